"use strict";
// node report_dom.js PAGE.html [SCRIPT]: runs the page's script on as much of a DOM as it needs, then SCRIPT (its `all(tag)` finds
// elements, `find(id)` one), and prints what that returns as JSON, else the text of the page. For where no browser is installed.
const fs = require("fs"), vm = require("vm");
const html = fs.readFileSync(process.argv[2], "utf8");
const scripts = [...html.matchAll(/<script[^>]*>([^]*?)<\/script>/g)].map((m) => m[1]);

class Text {
  constructor(text) { this.textContent = String(text); }
}
class Element {
  constructor(tag) {
    Object.assign(this, { tag, attrs: {}, childNodes: [], handlers: {}, style: {}, dataset: {}, parentNode: null, hidden: false });
    Object.assign(this, { clientWidth: 800, offsetWidth: 100, offsetHeight: 20 });
    this.classList = { contains: (name) => (this.attrs.class || "").split(" ").includes(name) };
  }
  setAttribute(name, value) { this.attrs[name] = String(value); }
  getAttribute(name) { return this.attrs[name] ?? null; }
  append(...nodes) {
    for (const n of nodes) {
      const node = n instanceof Element || n instanceof Text ? n : new Text(n);
      if (node.parentNode) node.parentNode.childNodes = node.parentNode.childNodes.filter((c) => c !== node);
      node.parentNode = this;
      this.childNodes.push(node);
    }
  }
  replaceChildren(...nodes) { this.childNodes = []; this.append(...nodes); }
  get children() { return this.childNodes.filter((c) => c instanceof Element); }
  get firstChild() { return this.childNodes[0] || null; }
  get textContent() { return this.childNodes.map((c) => c.textContent).join(""); }
  set textContent(text) { this.childNodes = [new Text(text)]; }
  addEventListener(kind, f) { (this.handlers[kind] = this.handlers[kind] || []).push(f); }
  fire(kind, more) { for (const f of this.handlers[kind] || []) f({ target: this, currentTarget: this, preventDefault() {}, ...more }); }
  click() { this.fire("click"); }
  getBoundingClientRect() { return { left: 0, top: 0, width: 800, height: 200 }; }
  getContext() { return new Proxy({}, { get: () => () => {}, set: () => true }); }
  *all() { yield this; for (const c of this.children) yield* c.all(); }
}

const root = new Element("html"), body = new Element("body"), page = new Element("div"), data = new Element("script");
Object.assign(page.attrs, { id: "page" });
Object.assign(data.attrs, { id: "data" });
data.textContent = scripts[0];
body.append(page, data);
const find = (id) => [...body.all()].find((e) => e.attrs.id === id) || null, all = (tag) => [...body.all()].filter((e) => e.tag === tag);
const document = {
  documentElement: root, body, activeElement: null, getElementById: find,
  createElement: (tag) => new Element(tag), createElementNS: (_, tag) => new Element(tag),
};
const scope = vm.createContext({
  document, all, find, console, devicePixelRatio: 1, innerWidth: 1280, innerHeight: 900, addEventListener() {},
  getComputedStyle: () => ({ getPropertyValue: () => "#000" }), matchMedia: () => ({ matches: false }),
  localStorage: { getItem: () => null, setItem() {} }, ResizeObserver: class { observe() {} },
  setTimeout: (f) => { f(); return 0; }, clearTimeout() {},
});
vm.runInContext(scripts[1], scope, { filename: "page.js", timeout: 10000 }); // an endless loop is an error
const said = process.argv[3] ? JSON.stringify(vm.runInContext(`(() => { ${process.argv[3]} })()`, scope, { timeout: 10000 })) : page.textContent;
process.stdout.write(said);
