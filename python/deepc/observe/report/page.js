"use strict";
// Draws the report from the JSON in #data. No library, no network. Text from a run reaches the page through textContent only.
(() => {
  const DATA = JSON.parse(document.getElementById("data").textContent);
  const RUNS = DATA.runs, MANY = RUNS.length > 1;
  const COLORS = ["#3f74c4", "#e0762e", "#2f9e6e", "#b5477d", "#8a63c9", "#a98514", "#2798ad", "#c74a40", "#6c7a3a", "#7a7f8c"];
  const color = (i) => COLORS[i % COLORS.length];
  const state = { axis: "step", smooth: 0, hidden: new Set(), run: 0, domain: null, log: new Set(["perplexity"]) };

  // ---- elements -----------------------------------------------------------------------------------------------------------
  function el(tag, attrs, ...children) {
    const node = document.createElement(tag);
    for (const [k, v] of Object.entries(attrs || {})) {
      if (v === null || v === undefined || v === false) continue;
      if (k.startsWith("on")) node.addEventListener(k.slice(2), v);
      else if (k === "style") node.style.cssText = v;
      else node.setAttribute(k, v === true ? "" : v);
    }
    for (const c of children.flat()) if (c !== null && c !== undefined && c !== false) node.append(c);
    return node;
  }
  function sv(tag, attrs, text) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [k, v] of Object.entries(attrs || {})) node.setAttribute(k, v);
    if (text !== undefined) node.textContent = text;
    return node;
  }
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  const swatch = (c) => el("i", { class: "swatch", style: `background:${c}` });
  const div = (cls, ...children) => el("div", { class: cls }, ...children);
  const span = (cls, ...children) => el("span", { class: cls }, ...children);
  const sub = (...children) => el("p", { class: "sub" }, ...children);
  const cell = (...children) => el("td", {}, ...children);
  const num = (...children) => el("td", { class: "n" }, ...children);
  const columns = (first, ...more) =>
    el("thead", {}, el("tr", {}, el("th", {}, first), more.map((name) => el("th", { class: "n" }, name))));
  const named = (hue, name) => el("span", {}, swatch(hue), " ", name);
  const legend = (...entries) => div("legend", ...entries.flat().map(([hue, name]) => el("span", {}, swatch(hue), name)));
  const titled = (text, more) => div("head", el("h3", {}, text), more);
  const tipRow = (label, value) => div("row", label, el("b", {}, value));
  const folded = (summary, content, open) => div("card", el("details", { open }, el("summary", {}, summary), content));
  const button = (label, onclick, pressed) =>
    el("button", { type: "button", "aria-pressed": pressed === undefined ? null : String(pressed), onclick }, label);
  const press = (one) => { for (const b of one.parentNode.children) b.setAttribute("aria-pressed", String(b === one)); };

  // ---- numbers ------------------------------------------------------------------------------------------------------------
  const some = (v) => typeof v === "number" && Number.isFinite(v);
  function short(v, digits = 4) {
    if (!some(v)) return "–";
    const a = Math.abs(v);
    if (a !== 0 && (a < 1e-3 || a >= 1e7)) return v.toExponential(Math.max(0, digits - 2)).replace("e+", "e").replace(/\.?0+e/, "e");
    if (a >= 1000) return v.toLocaleString("en-US", { maximumFractionDigits: a >= 1e5 ? 0 : 1 });
    return String(+v.toPrecision(digits));
  }
  function bytes(v) {
    if (!some(v)) return "–";
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let i = 0, a = v;
    while (Math.abs(a) >= 1024 && i < 4) { a /= 1024; i++; }
    return `${+a.toPrecision(a >= 1000 ? 4 : 3)} ${units[i]}`;
  }
  function seconds(v) {
    if (!some(v)) return "–";
    if (v < 0) return `−${seconds(-v)}`;
    if (v < 1e-3) return `${+(v * 1e6).toPrecision(3)} µs`;
    if (v < 1) return `${+(v * 1e3).toPrecision(3)} ms`;
    if (v < 120) return `${+v.toPrecision(3)} s`;
    const of = (n, unit, rest) => `${Math.floor(n / 60)} ${unit} ${n % 60} ${rest}`; // of what is rounded: 59.7 s is a minute
    return v < 7200 ? of(Math.round(v), "min", "s") : of(Math.round(v / 60), "h", "min");
  }
  const percent = (v) => (some(v) ? `${+(100 * v).toPrecision(3)} %` : "–");
  const UNITS = [[1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]]; // from, divisor, unit
  function count(v) {
    if (!some(v)) return "–";
    const unit = UNITS.find(([from]) => v >= from);
    return unit ? `${+(v / unit[1]).toPrecision(3)} ${unit[2]}` : String(v);
  }
  // Names that a run gives may be those of every object, "constructor": tables that are asked for them have no others.
  const FORMATS = { __proto__: null, time_s: seconds, fraction_of_peak: percent };
  const form = (name) => FORMATS[name] || short;
  const TITLES = {
    __proto__: null,
    loss: "Loss", lr: "Learning rate", grad_norm: "Gradient norm", tokens_per_s: "Tokens / s", samples_per_s: "Samples / s",
    "exchange.bytes": "Bytes exchanged by a rank (1-bit optimizer)", time_s: "Time of a step", loss_scale: "Loss scale", tflops: "TFLOP / s", fraction_of_peak: "Fraction of peak",
  };
  const title = (name) => TITLES[name] || name;

  function ticks(lo, hi, n) {
    const span = hi - lo || 1, raw = span / n, mag = 10 ** Math.floor(Math.log10(raw)), r = raw / mag;
    const step = (r >= 7 ? 10 : r >= 3 ? 5 : r >= 1.5 ? 2 : 1) * mag, out = [], first = Math.ceil(lo / step - 1e-9);
    for (let i = 0; i < 2 * n + 2; i++) { // a step may be too small to change numbers as large as these
      const t = (first + i) * step;
      if (!(t <= hi + step * 1e-9)) break;
      out.push(Math.abs(t) < step * 1e-9 ? 0 : t);
    }
    return out;
  }

  function byteTicks(lo, hi, n) {
    const unit = 1024 ** Math.max(0, Math.floor(Math.log2(Math.max(1, hi)) / 10));
    return ticks(lo / unit, hi / unit, n).map((t) => t * unit);
  }

  // ---- the tip ------------------------------------------------------------------------------------------------------------
  const tip = el("div", { class: "tip", hidden: true, role: "status" });
  document.body.append(tip);
  function showTip(x, y, ...content) {
    tip.replaceChildren(...content.flat());
    tip.hidden = false;
    const w = tip.offsetWidth, h = tip.offsetHeight;
    tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - w - 6))}px`;
    tip.style.top = `${y + 16 + h > innerHeight ? Math.max(4, y - h - 12) : y + 16}px`;
  }
  const hideTip = () => { tip.hidden = true; };

  // ---- line chart ---------------------------------------------------------------------------------------------------------
  const charts = [];
  const redraw = () => charts.forEach((c) => c.draw());
  function smoothed(ys, f) {
    if (!f) return ys;
    let m = 0, w = 0;
    return ys.map((y) => { m = f * m + (1 - f) * y; w = f * w + (1 - f); return m / w; });
  }
  // series: () => [{name, color, x, y, marks, mean}]; mean, {x, y}: of a long curve, whose x and y are the lowest and highest of each stretch
  function lineChart(host, series, { tall = 190, format = short, zero = false, key = "", xformat = null, zoom = true } = {}) {
    const box = el("div", { class: "chart" });
    host.append(box);
    let view = null;
    function draw() {
      const all = series().filter((s) => s.x.length);
      const width = Math.max(200, box.clientWidth || host.clientWidth || 400);
      const height = width < 420 ? Math.round(tall * 0.8) : tall;
      const left = 54, right = 8, top = 8, bottom = 22, w = width - left - right, h = height - top - bottom;
      const svg = sv("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": key });
      box.replaceChildren(svg);
      if (!all.length) { svg.append(sv("text", { x: left, y: height / 2, fill: css("soft") }, "no values")); view = null; return; }
      let x0 = Infinity, x1 = -Infinity;
      for (const s of all) { x0 = Math.min(x0, s.x[0]); x1 = Math.max(x1, s.x[s.x.length - 1]); }
      if (zoom && state.domain) [x0, x1] = state.domain;
      if (x1 <= x0) { x0 -= 0.5; x1 += 0.5; }
      const log = state.log.has(key);
      const ok = (y) => Number.isFinite(y) && (!log || y > 0);
      let y0 = Infinity, y1 = -Infinity;
      const drawn = all.map((s) => {
        const line = s.mean || s;
        return { ...s, line: { x: line.x, y: zoom ? smoothed(line.y, state.smooth) : line.y } };
      });
      for (const s of drawn) {
        const seen = state.smooth && zoom ? s.line : s;
        seen.y.forEach((y, i) => {
          if (seen.x[i] < x0 || seen.x[i] > x1 || !ok(y)) return;
          y0 = Math.min(y0, y);
          y1 = Math.max(y1, y);
        });
      }
      if (y0 > y1) { y0 = log ? 0.1 : 0; y1 = 1; }
      if (zero && !log) y0 = Math.min(0, y0);
      const flat = y1 - y0 <= 1e-9 * Math.max(Math.abs(y0), Math.abs(y1)); // a constant, but for its rounding
      if (flat) { const d = Math.abs(y0) * 0.1 || 1; y0 = log ? y0 / 2 : y0 - d; y1 = log ? y1 * 2 : y1 + d; }
      const f = log ? Math.log10 : (v) => v;
      const pad = (f(y1) - f(y0)) * 0.05, lo = f(y0) - (zero && y0 === 0 && !log ? 0 : pad), hi = f(y1) + pad;
      const X = (x) => left + ((x - x0) / (x1 - x0)) * w, Y = (y) => top + (1 - (f(y) - lo) / (hi - lo)) * h;
      const axis = sv("g", { class: "axis" });
      const yt = log ? logTicks(lo, hi) : (format === bytes ? byteTicks : ticks)(lo, hi, Math.max(2, Math.round(h / 42)));
      // as many digits as tell one line from the next
      const most = Math.max(...yt.map(Math.abs)), digits = yt.length > 1 ? Math.ceil(Math.log10(most / (yt[1] - yt[0]))) + 1 : 4;
      const label = format === short ? (t) => short(t, Math.max(4, Math.min(12, digits))) : format;
      for (const t of yt) {
        const y = Y(t);
        axis.append(sv("line", { x1: left, x2: width - right, y1: y, y2: y }));
        axis.append(sv("text", { x: left - 7, y: y + 4, "text-anchor": "end" }, label(t)));
      }
      const xf = xformat || (state.axis === "time" && zoom ? seconds : (v) => short(v, 6));
      for (const t of ticks(x0, x1, Math.max(2, Math.round(w / 110)))) {
        axis.append(sv("text", { x: X(t), y: height - 6, "text-anchor": "middle" }, xf(t)));
      }
      svg.append(axis);
      const clip = `c${Math.random().toString(36).slice(2)}`;
      const defs = sv("defs"), cp = sv("clipPath", { id: clip });
      cp.append(sv("rect", { x: left, y: 0, width: w, height: height }));
      defs.append(cp);
      const lines = sv("g", { "clip-path": `url(#${clip})` });
      svg.append(defs, lines);
      const path = ({ x, y }) => {
        let d = "", pen = false;
        x.forEach((at, i) => {
          if (ok(y[i])) d += `${pen ? "L" : "M"}${X(at).toFixed(1)} ${Y(y[i]).toFixed(1)}`;
          pen = ok(y[i]);
        });
        return d;
      };
      for (const s of drawn) {
        const stroke = { fill: "none", stroke: s.color };
        if (s.mean || (zoom && state.smooth)) lines.append(sv("path", { d: path(s), ...stroke, "stroke-width": 1, opacity: s.mean ? 0.4 : 0.25 }));
        const dashes = { "stroke-linejoin": "round", "stroke-dasharray": s.dash || "none" };
        lines.append(sv("path", { d: path(s.line), ...stroke, ...dashes, "stroke-width": 1.6 }));
        if (s.x.length === 1 && ok(s.y[0])) lines.append(sv("circle", { cx: X(s.x[0]), cy: Y(s.y[0]), r: 3, fill: s.color }));
        const low = { y1: height - bottom, y2: height - bottom - 9 };
        const marked = new Set((s.marks || []).filter((m) => m >= x0 && m <= x1).map((m) => Math.round(X(m)))); // one a pixel
        for (const x of marked) lines.append(sv("line", { ...low, x1: x, x2: x, stroke: css("bad"), "stroke-width": 1.5 }));
      }
      const cross = sv("line", { y1: top, y2: height - bottom, stroke: css("faint"), "stroke-dasharray": "3 3", visibility: "hidden" });
      const brush = sv("rect", { y: top, height: h, fill: css("accent"), opacity: 0.15, visibility: "hidden" });
      svg.append(cross, brush);
      view = { x0, x1, left, w, drawn, cross, brush, X, xf, inverse: (px) => x0 + ((px - left) / w) * (x1 - x0) };
    }
    let from = null;
    const at = (e) => e.clientX - box.getBoundingClientRect().left;
    box.addEventListener("pointermove", (e) => {
      if (!view) return;
      const px = Math.max(view.left, Math.min(view.left + view.w, at(e))), x = view.inverse(px);
      view.cross.setAttribute("x1", px); view.cross.setAttribute("x2", px); view.cross.setAttribute("visibility", "visible");
      if (from !== null) {
        view.brush.setAttribute("x", Math.min(from, px));
        view.brush.setAttribute("width", Math.abs(px - from));
        view.brush.setAttribute("visibility", "visible");
      }
      const rows = view.drawn.map((s) => {
        const i = nearest(s.x, x);
        const mean = s.mean ? `, mean of ${short(s.per, 9)} steps ${format(s.mean.y[nearest(s.mean.x, x)])}` : "";
        return tipRow(named(s.color, s.name), `${format(s.y[i])}${mean}`);
      });
      const s0 = view.drawn[0];
      const where = `${xformat || state.axis === "time" ? "at" : "step"} ${view.xf(s0.x[nearest(s0.x, x)])}`;
      showTip(e.clientX, e.clientY, div("sub", where), rows);
    });
    box.addEventListener("pointerleave", () => { hideTip(); if (view) { view.cross.setAttribute("visibility", "hidden"); } });
    if (zoom) {
      box.addEventListener("pointerdown", (e) => { if (e.pointerType === "mouse" && view) from = at(e); });
      addEventListener("pointerup", (e) => {
        if (from === null || !view) return;
        const px = at(e), far = Math.abs(px - from) > 6;
        const a = view.inverse(from), b = view.inverse(Math.max(view.left, Math.min(view.left + view.w, px)));
        from = null;
        view.brush.setAttribute("visibility", "hidden");
        if (far) { state.domain = [Math.min(a, b), Math.max(a, b)]; redraw(); }
      });
      box.addEventListener("dblclick", () => { state.domain = null; redraw(); });
    }
    charts.push({ draw });
    draw();
    return box;
  }
  function logTicks(lo, hi) {
    const out = [];
    const factors = hi - lo < 1.5 ? [1, 2, 5] : [1];
    for (let e = Math.floor(lo); e <= Math.ceil(hi); e++) out.push(...factors.map((m) => m * 10 ** e));
    const inside = out.filter((v) => Math.log10(v) >= lo && Math.log10(v) <= hi);
    return inside.length > 1 ? inside : ticks(10 ** lo, 10 ** hi, 3).filter((t) => t > 0);
  }
  function nearest(xs, x) {
    let a = 0, b = xs.length - 1;
    while (b - a > 1) { const m = (a + b) >> 1; if (xs[m] < x) a = m; else b = m; }
    return Math.abs(xs[a] - x) <= Math.abs(xs[b] - x) ? a : b;
  }

  // ---- sections -----------------------------------------------------------------------------------------------------------
  const page = document.getElementById("page");
  page.replaceChildren();
  const nav = el("nav", { "aria-label": "Sections" });
  const sections = {}, around = {}; // id -> its body; id -> its heading and its link
  function section(id, name) {
    const body = el("div"), link = el("a", { href: `#${id}` }, name), head = el("h2", { id }, name);
    nav.append(link);
    sections[id] = body;
    around[id] = [head, link];
    return [head, body];
  }
  const empty = (...text) => el("div", { class: "card empty" }, ...text);
  const run = () => RUNS[state.run];

  function header() {
    const r = RUNS[0], i = r.info, s = r.summary;
    const facts = [];
    if (!MANY) {
      if (s.model) facts.push(el("b", {}, s.model));
      const part = some(s.trainable) && s.trainable !== s.parameters ? ` (${count(s.trainable)} trained)` : "";
      if (some(s.parameters)) facts.push(`${count(s.parameters)} parameters${part}`);
      if (s.stage !== null && s.stage !== undefined) facts.push(`ZeRO stage ${s.stage}`);
      if (s.precision) facts.push(String(s.precision));
      const nodes = s.nodes > 1 ? ` on ${s.nodes} nodes` : "", host = i.host ? ` on ${i.host}` : "";
      if (s.ranks) facts.push(`${s.ranks} rank${s.ranks > 1 ? "s" : ""}${nodes}${host}`);
      if (i.device) facts.push(String(i.device));
      if (i.started) facts.push(`started ${String(i.started).replace("T", " ").replace(/(\+00:00|Z)$/, " UTC")}`);
      const version = (k) => i[k.toLowerCase()];
      const versions = ["deepc", "torch", "Python"].filter((k) => typeof version(k) === "string").map((k) => `${k} ${version(k)}`);
      if (versions.length) facts.push(versions.join(", "));
    } else facts.push(RUNS.map((x) => x.name).join(", "));
    const theme = el("button", { type: "button", "aria-label": "dark or light", onclick: () => {
      const d = document.documentElement, dark = d.dataset.theme !== "dark";
      d.dataset.theme = dark ? "dark" : "light";
      try { localStorage.setItem("deepc-report-theme", d.dataset.theme); } catch { /* a file: page may have no storage */ }
      redraw(); drawRun();
    } }, "◐");
    return el("header", { class: "top" },
      el("div", {},
        div("kicker", MANY ? "deepc: comparison of runs" : "deepc: report of a run"),
        el("h1", {}, MANY ? `${RUNS.length} runs` : r.name),
        div("sub", facts.flatMap((f, n) => (n ? [" · ", f] : [f])))),
      theme);
  }

  function tiles(s) {
    const out = [];
    const tile = (label, value, more) => out.push(div("tile", div("label", label), div("value", value), div("more", more || " ")));
    const unit = (v, u) => [v, " ", el("small", {}, u)];
    const over = s.tail_steps > 1 ? `mean of the last ${s.tail_steps} steps, ` : "";
    if (some(s.tail_loss)) tile("Loss", short(s.tail_loss), `${over}from ${short(s.first_loss)}`);
    else if (s.loss) tile("Loss", s.loss, `at the last step, from ${short(s.first_loss)}`); // "nan": it is none any more
    const lowest = s.best_validation < s.validation ? `, lowest ${short(s.best_validation)}` : "";
    if (some(s.validation)) tile("Validation loss", short(s.validation), `last ${s.validation_name}${lowest}`);
    if (some(s.tokens_per_s)) tile("Tokens / s", short(s.tokens_per_s, 3), "median");
    else if (some(s.samples_per_s)) tile("Samples / s", short(s.samples_per_s, 3), "median");
    if (some(s.step_s)) tile("Time of a step", seconds(s.step_s), `median; slowest after the first ${seconds(s.slowest_s)}`);
    const ofPeak = some(s.fraction_of_peak) ? `${percent(s.fraction_of_peak)} of peak` : "median";
    if (some(s.tflops)) tile("TFLOP / s", short(s.tflops, 3), ofPeak);
    if (some(s.waiting)) tile("Waiting", percent(s.waiting), "of a step");
    if (some(s.peak_bytes)) { const [v, u] = bytes(s.peak_bytes).split(" "); tile("Memory", unit(v, u), "largest measured"); }
    const took = some(s.duration_s) ? `, ${seconds(s.duration_s)}` : "";
    tile("Steps", short(s.steps, 9), `${s.skipped ? `${s.skipped} skipped` : "none skipped"}${took}`);
    return el("div", { class: "tiles" }, out);
  }

  function findings(r) {
    if (!r.findings.length) return null;
    const rank = { bad: 0, note: 1, good: 2 };
    const ordered = [...r.findings].sort((a, b) => rank[a.level] - rank[b.level]);
    const entry = (f) => el("li", { class: f.level }, f.text, f.fix ? span("fix", ` – ${f.fix}`) : null);
    return el("ul", { class: "findings" }, ordered.map(entry));
  }

  // ---- comparison ---------------------------------------------------------------------------------------------------------
  const ROWS = [ // key, name, format, which is better: more (1), less (-1), neither (0)
    ["tail_loss", "loss, mean of the last steps", short, -1], ["tail_steps", "so many steps", short, 0],
    ["loss", "last loss", (v) => (some(v) ? short(v) : v), -1],
    ["best_loss", "best loss", short, -1], ["validation", "validation loss", short, -1], ["best_validation", "lowest validation loss", short, -1],
    ["tokens_per_s", "tokens / s", short, 1], ["samples_per_s", "samples / s", short, 1], ["step_s", "time of a step", seconds, -1],
    ["tflops", "TFLOP / s", short, 1], ["fraction_of_peak", "fraction of peak", percent, 1], ["waiting", "waiting", percent, -1],
    ["peak_bytes", "memory", bytes, -1], ["skipped", "skipped steps", short, 0], ["steps", "steps", short, 0],
    ["duration_s", "duration", seconds, 0], ["parameters", "parameters", count, 0], ["ranks", "ranks", short, 0],
    ["stage", "ZeRO stage", short, 0], ["precision", "precision", String, 0],
  ];
  function comparison() {
    const clear = (v, best) => some(best) && (v === best || Math.abs(v / best - 1) < 0.01);
    const missing = (v) => v === null || v === undefined || v === "";
    const heads = () => columns(null, ...RUNS.map((r, i) => [swatch(color(i)), " ", r.name]));
    const table = el("table", { id: "comparison" }, heads());
    const body = el("tbody");
    for (const [key, name, f, better] of ROWS) {
      const vs = RUNS.map((r) => r.summary[key]);
      if (vs.every(missing)) continue;
      const numbers = vs.filter(some), top = better > 0 ? Math.max : Math.min;
      const best = better && numbers.length > 1 ? top(...numbers) : NaN;
      const all = numbers.every((v) => clear(v, best)); // a difference below 1 % is none
      body.append(el("tr", {}, el("td", {}, name), vs.map((v, i) => {
        const relative = i && better && some(v) && some(vs[0]) && vs[0] ? (v - vs[0]) / Math.abs(vs[0]) : NaN;
        const change = some(relative) ? span("delta", `${relative >= 0 ? "+" : "−"}${Math.abs(100 * relative).toFixed(1)} %`) : null;
        return el("td", { class: `n${!all && some(v) && clear(v, best) ? " best" : ""}` }, missing(v) ? "–" : f(v), change);
      })));
    }
    table.append(body);
    const out = [el("div", { class: "card", style: "margin-top:16px" }, el("div", { class: "scroll" }, table))];
    function flat(o, p, into) {
      for (const [k, v] of Object.entries(o || {})) {
        const name = p ? `${p}.${k}` : k;
        if (v && typeof v === "object" && !Array.isArray(v)) flat(v, name, into);
        else into[name] = JSON.stringify(v);
      }
      return into;
    }
    const configs = RUNS.map((r) => flat(r.config, "", { __proto__: null }));
    const differs = (k) => k !== "deepc.run_dir" && new Set(configs.map((c) => c[k])).size > 1;
    const keys = [...new Set(configs.flatMap(Object.keys))].sort().filter(differs);
    if (keys.length) {
      const value = (c, k) => el("td", { class: "n key" }, c[k] === undefined ? "–" : c[k]);
      const rows = keys.map((k) => el("tr", {}, el("td", { class: "key" }, k), configs.map((c) => value(c, k))));
      out.push(div("card", el("h3", {}, "Where the configurations differ"),
        div("scroll", el("table", { id: "differences" }, heads(), el("tbody", {}, rows)))));
    }
    return out;
  }

  // ---- curves -------------------------------------------------------------------------------------------------------------
  const MAIN = ["loss", "lr", "grad_norm", "tokens_per_s", "time_s", "loss_scale", "eval_loss", "exchange.bytes",
    ...RUNS.map((r) => r.summary.validation_name)];
  const curve = (r, name) => (Object.hasOwn(r.curves, name) ? r.curves[name] : null);
  function curves(host) {
    const names = [...new Set(RUNS.flatMap((r) => Object.keys(r.curves)))];
    if (!names.length) {
      const key = el("code", {}, '{"deepc": {"run_dir": "runs/name"}}');
      host.append(empty("No steps were recorded. A run writes them when its configuration has ", key, "."));
      return;
    }
    const axis = (name, label) => button(label, (e) => {
      state.axis = name; state.domain = null;
      press(e.target);
      redraw();
    }, state.axis === name);
    const range = el("input", {
      type: "range", min: 0, max: 0.98, step: 0.02, value: 0, "aria-label": "smoothing",
      oninput: (e) => { state.smooth = +e.target.value; redraw(); },
    });
    const bar = div("bar", span("group", axis("step", "by step"), axis("time", "by time")), el("label", {}, "smoothing", range),
      button("whole run", () => { state.domain = null; redraw(); }), el("span", {}, "drag over a chart to zoom all"));
    const toggle = (i) => (e) => {
      if (state.hidden.has(i)) state.hidden.delete(i); else state.hidden.add(i);
      e.currentTarget.style.opacity = state.hidden.has(i) ? 0.4 : 1;
      redraw();
    };
    const shown = () => RUNS.map((r, i) => button([swatch(color(i)), " ", r.name], toggle(i)));
    if (MANY) bar.append(el("span", { class: "legend", style: "margin:0" }, shown()));
    const grid = el("div", { class: "grid" }), rest = el("div", { class: "grid" });
    host.append(bar, grid);
    const varies = (r, n) => n !== "loss_scale" || new Set(r.curves[n].value).size > 1;
    const first = new Set(names.filter((n) => MAIN.includes(n) && RUNS.some((r) => curve(r, n) && varies(r, n))));
    if (!first.has("tokens_per_s") && names.includes("samples_per_s")) first.add("samples_per_s");
    for (const name of names) {
      const values = RUNS.map((r) => curve(r, name)).find((c) => c).value;
      const now = span("now", MANY ? "" : `last ${form(name)(values[values.length - 1])}`);
      const logb = button("log", () => {
        if (state.log.has(name)) state.log.delete(name); else state.log.add(name);
        logb.setAttribute("aria-pressed", String(state.log.has(name)));
        redraw();
      }, state.log.has(name));
      const card = el("div", { class: "card", "data-curve": name }, titled(title(name), el("span", {}, now, " ", logb)));
      (first.has(name) || !first.size ? grid : rest).append(card);
      lineChart(card, () => RUNS.flatMap((r, i) => {
        const c = curve(r, name);
        if (!c || state.hidden.has(i)) return [];
        const xs = (of) => (state.axis === "time" ? of.time : of.step);
        const at = (step) => (state.axis === "time" ? c.time[nearest(c.step, step)] : step);
        const mean = c.mean ? { x: xs(c.mean), y: c.mean.value } : null;
        const marks = ["loss", "loss_scale", "grad_norm"].includes(name) ? r.skipped.map(at) : [];
        return [{ name: MANY ? r.name : title(name), color: MANY ? color(i) : css("accent"), x: xs(c), y: c.value, marks, mean, per: c.per }];
      }), { format: form(name), key: name });
    }
    if (rest.children.length) {
      const others = names.filter((n) => first.size && !first.has(n)).map(title).join(", ");
      host.append(el("details", { class: "more", ontoggle: redraw }, el("summary", {}, `${rest.children.length} more: ${others}`), rest));
    }
    if (RUNS.some((r) => r.skipped.length)) host.append(legend([[css("bad"), "ticks at the bottom: skipped steps"]]));
    const long = Math.max(...names.flatMap((n) => RUNS.map((r) => (curve(r, n) || {}).per || 0)));
    if (long) host.append(sub(`Of a long curve the line is the mean of each stretch of up to ${short(long, 9)} steps, what is paler its lowest and highest values.`));
  }

  // ---- time of a step -----------------------------------------------------------------------------------------------------
  const PARTS = ["compute", "communication", "data", "disk"];
  function time(host) {
    const rows = MANY ? RUNS : [run()];
    const withSplit = rows.filter((r) => r.split);
    if (!withSplit.length) { host.append(empty("how long the steps waited")); return; }
    const longest = Math.max(...withSplit.map((r) => PARTS.reduce((a, p) => a + r.split.mean[p], 0)));
    const bars = el("div", { class: "hbars" });
    for (const r of withSplit) {
      const total = PARTS.reduce((a, p) => a + r.split.mean[p], 0);
      const part = (p) => el("div", {
        style: `background:${css(p)};width:${(100 * r.split.mean[p]) / longest}%`, title: `${p}: ${seconds(r.split.mean[p])}`,
      });
      bars.append(el("div", {}, MANY ? r.name : "mean step"), el("div", { class: "track", style: "height:26px" }, PARTS.map(part)),
        el("div", {}, seconds(total)));
    }
    const r = run(), mean = r.split ? r.split.mean : null, total = mean ? PARTS.reduce((a, p) => a + mean[p], 0) : 0;
    const share = (p) => (mean ? `${p} ${seconds(mean[p])} (${percent(total ? mean[p] / total : 0)})` : p);
    const card = div("card", bars, legend(PARTS.map((p) => [css(p), share(p)])));
    host.append(card);
    if (r.split && r.split.step.length > 1) {
      const more = div("card", titled("Step by step", span("now", MANY ? r.name : "")));
      host.append(more);
      stackedBars(more, r.split);
    }
  }
  function stackedBars(host, split) {
    const box = el("div", { class: "chart" });
    host.append(box);
    function draw() {
      const width = Math.max(200, box.clientWidth), height = 170, left = 54, right = 8, top = 6, bottom = 22;
      const w = width - left - right, h = height - top - bottom, n = split.step.length;
      const totals = split.step.map((_, i) => PARTS.reduce((a, p) => a + split.parts[p][i], 0));
      const sorted = [...totals].sort((a, b) => a - b), max = Math.min(sorted[n - 1], sorted[Math.floor(0.98 * (n - 1))] * 1.6) || 1;
      const svg = sv("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "time of each step" });
      const axis = sv("g", { class: "axis" });
      const Y = (v) => top + (1 - Math.min(v, max) / max) * h;
      for (const t of ticks(0, max, 3)) {
        axis.append(sv("line", { x1: left, x2: width - right, y1: Y(t), y2: Y(t) }));
        axis.append(sv("text", { x: left - 7, y: Y(t) + 4, "text-anchor": "end" }, seconds(t)));
      }
      const each = w / n, gap = each > 4 ? 1 : 0;
      for (const t of ticks(0, n - 1, Math.max(2, Math.round(w / 110))).filter(Number.isInteger)) {
        axis.append(sv("text", { x: left + (t + 0.5) * each, y: height - 6, "text-anchor": "middle" }, short(split.step[t], 6)));
      }
      svg.append(axis);
      for (const [k, p] of PARTS.entries()) {
        let d = "";
        split.step.forEach((_, i) => {
          const below = PARTS.slice(0, k).reduce((a, q) => a + split.parts[q][i], 0);
          const x = left + i * each, y0 = Y(below), y1 = Y(below + split.parts[p][i]);
          const wide = each - gap;
          if (y0 - y1 > 0.05) d += `M${x.toFixed(2)} ${y0.toFixed(2)}h${wide.toFixed(2)}V${y1.toFixed(2)}h${(-wide).toFixed(2)}z`;
        });
        svg.append(sv("path", { d, fill: css(p) }));
      }
      box.replaceChildren(svg);
      box.onpointermove = (e) => {
        const i = Math.floor((e.clientX - box.getBoundingClientRect().left - left) / each);
        if (i < 0 || i >= n) { hideTip(); return; }
        const which = split.to[i] > split.step[i] ? `steps ${split.step[i]} to ${split.to[i]}, mean` : `step ${split.step[i]}`;
        const rows = PARTS.map((p) => tipRow(named(css(p), p), seconds(split.parts[p][i])));
        showTip(e.clientX, e.clientY, div("sub", which), rows, tipRow(el("span", {}, "all"), seconds(totals[i])));
      };
      box.onpointerleave = hideTip;
    }
    charts.push({ draw, of: "run" });
    draw();
  }

  // ---- pipeline -----------------------------------------------------------------------------------------------------------
  const WORK = { F: ["#4e79a7", "forward"], B: ["#59a14f", "backward"], I: ["#76b7b2", "gradients of inputs"], W: ["#f28e2b", "gradients of weights"] };
  function pipeline(host) {
    const r = run(), p = r.pipeline;
    if (!p) {
      const asked = r.config.pipeline && r.config.pipeline.stages > 1, model = r.info.model && r.info.model.class === "PipelineModule";
      if (asked || model) host.append(empty("the schedule of a pipeline (its third batch, or ", el("code", {}, "engine.measure_batch"), ", records one)"));
      return;
    }
    const box = el("div", { class: "chart", id: "schedules" }), ROW = 20, HEAD = 24, left = 56, right = 8;
    function draw() {
      const width = Math.max(280, box.clientWidth), w = width - left - right, most = Math.max(p.predicted.us, p.measured.us);
      const block = HEAD + p.ranks * ROW + 8, height = 2 * block + 18, X = (us) => left + (us / most) * w;
      const svg = sv("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "the predicted schedule above the measured one" });
      const axis = sv("g", { class: "axis" });
      for (const t of ticks(0, most, Math.max(2, Math.round(w / 110)))) {
        axis.append(sv("line", { x1: X(t), x2: X(t), y1: HEAD, y2: height - 18 }));
        axis.append(sv("text", { x: X(t), y: height - 4, "text-anchor": "middle" }, seconds(t / 1e6)));
      }
      svg.append(axis);
      ["predicted", "measured"].forEach((name, k) => {
        const side = p[name], top = k * block, group = sv("g", { "data-lanes": name });
        const said = `${name}: ${seconds(side.us / 1e6)}, ranks wait ${percent(side.waits)}`;
        group.append(sv("text", { x: left, y: top + 16, fill: css("ink"), "font-size": 12.5 }, said));
        side.spans.forEach((row, rank) => {
          const y = top + HEAD + rank * ROW;
          group.append(sv("text", { x: 0, y: y + 12, fill: css("soft"), "font-size": 11 }, `rank ${rank}`));
          group.append(sv("rect", { x: left, y, width: w, height: ROW - 4, fill: css("grid") }));
          row.forEach(([from, to], i) => {
            const [label, kind, stage] = p.actions[rank][i], shade = 1 - (0.5 * Math.floor(stage / p.ranks)) / p.chunks;
            const bar = sv("rect", { x: X(from), y, width: Math.max(0.5, X(to) - X(from) - 0.5), height: ROW - 4, fill: WORK[kind][0], opacity: shade });
            bar.onpointermove = (e) => showTip(e.clientX, e.clientY, el("b", {}, label), div("sub", `${name}: ${WORK[kind][1]} in stage ${stage}`),
              tipRow("takes", seconds((to - from) / 1e6)), tipRow("from", seconds(from / 1e6)));
            bar.onpointerleave = hideTip;
            group.append(bar);
            if (X(to) - X(from) > 7 * label.length + 2) {
              const at = { x: (X(from) + X(to)) / 2, y: y + 12, "text-anchor": "middle", "font-size": 10, fill: "#fff", "pointer-events": "none" };
              group.append(sv("text", at, label));
            }
          });
        });
        svg.append(group);
      });
      box.replaceChildren(svg);
    }
    const kinds = Object.keys(WORK).filter((k) => p.actions.flat().some((a) => a[1] === k)), all = p.stages.map((s) => s.F + s.I + s.W);
    const mean = all.reduce((a, b) => a + b, 0) / all.length;
    const line = (s, i) => el("tr", {}, cell(`stage ${i}`), num(seconds(s.F)), num(seconds(s.I + s.W)), num(seconds(all[i]), span("delta", percent(all[i] / mean))));
    host.append(div("card", titled(`Step ${p.step}: ${p.micro_batches} micro-batches through ${p.ranks} ranks`), box,
      legend(kinds.map((k) => WORK[k])),
      el("table", { id: "stages", style: "margin-top:12px" }, columns("one micro-batch, median", "forward", "backward", "both, of the mean"), el("tbody", {}, p.stages.map(line))),
      sub("Predicted: the schedule with these times of stages, and none for messages. Ranks on nodes with clocks of their own may be shifted.")));
    charts.push({ draw, of: "run" });
    draw();
  }

  // ---- timeline -----------------------------------------------------------------------------------------------------------
  const KINDS = [
    ["communication", /comm|nccl|gloo|reduce|gather/], ["disk", /disk|io\b|nvme|file/], ["waiting", /wait|idle/], ["data", /data|load/],
  ];
  function laneColor(lane) {
    const n = lane.toLowerCase();
    if (n === "steps") return "faint";
    if (n === "modules") return "modules";
    return (KINDS.find(([, words]) => words.test(n)) || ["compute"])[0];
  }
  function timeline(host) {
    const t = run().timeline;
    if (!t) {
      host.append(empty("a timeline (", el("code", {}, '{"deepc": {"timeline": {"steps": [10, 12]}}}'), " records one)"));
      return;
    }
    // nested events of a lane lie one below the other
    const depth = new Array(t.events.length), open = t.lanes.map(() => []), rows = t.lanes.map(() => 1);
    const hues = t.lanes.map((l) => laneColor(l.name));
    t.events.forEach(([lane, , b, d], i) => {
      const stack = open[lane];
      while (stack.length && stack[stack.length - 1] <= b + 0.005) stack.pop();
      depth[i] = Math.min(stack.length, 7);
      rows[lane] = Math.max(rows[lane], depth[i] + 1);
      stack.push(b + d);
    });
    const end = Math.max(...t.events.reduce((m, e) => (e[2] + e[3] > m[0] ? [e[2] + e[3]] : m), [1]));
    const canvas = el("canvas", { tabindex: 0, "aria-label": "timeline of the ranks; arrows move, + and - zoom, 0 shows all" });
    const table = el("div", { class: "scroll" });
    let a = 0, b = end, chosen = -1;
    if (t.steps.length > 2) {
      const s = t.steps[Math.floor(t.steps.length / 2)];
      a = Math.max(0, s[0] - 0.1 * s[1]);
      b = Math.min(end, s[0] + 1.1 * s[1]);
    }
    const ROW = 15, GAP = 7, HEAD = 24, tops = [];
    let height = HEAD, lastRank = null;
    t.lanes.forEach((l, i) => {
      if (lastRank !== null && l.rank !== lastRank) height += 8;
      lastRank = l.rank;
      tops[i] = height;
      height += rows[i] * ROW + GAP;
    });
    let left = 120, hits = [];
    function draw() {
      const width = canvas.clientWidth || 600, ratio = devicePixelRatio || 1, g = canvas.getContext("2d");
      left = width < 560 ? 74 : 150;
      canvas.width = width * ratio; canvas.height = height * ratio; canvas.style.height = `${height}px`;
      g.setTransform(ratio, 0, 0, ratio, 0, 0);
      g.clearRect(0, 0, width, height);
      const w = width - left, X = (u) => left + ((u - a) / (b - a)) * w;
      const ink = css("ink"), soft = css("soft"), grid = css("grid"), font = "11px system-ui, sans-serif";
      g.font = font;
      g.textBaseline = "middle";
      g.fillStyle = css("hover");
      t.steps.forEach(([s, d], k) => {
        const from = Math.max(left, X(s));
        if (k % 2 === 0 && X(s + d) > left && X(s) < width) g.fillRect(from, HEAD - 6, X(s + d) - from, height);
      });
      g.strokeStyle = grid; g.fillStyle = soft; g.textAlign = "center";
      for (const k of ticks(a, b, Math.max(2, Math.round(w / 120)))) {
        const x = X(k);
        g.beginPath();
        g.moveTo(x, HEAD - 6);
        g.lineTo(x, height);
        g.stroke();
        if (x > left + 20 && x < width - 20) g.fillText(seconds(k / 1e6), x, 9);
      }
      hits = [];
      const fills = Object.fromEntries(["compute", "communication", "data", "disk", "waiting", "modules", "faint"].map((k) => [k, css(k)]));
      g.textAlign = "left";
      // what is thinner than a pixel is drawn once per pixel: `ends` is where the lane's row is already painted
      const ends = t.lanes.map((_, i) => new Float32Array(rows[i]).fill(-1));
      t.events.forEach(([lane, name, s, d], i) => {
        if (s + d < a || s > b) return;
        const x0 = Math.max(left, X(s)), x1 = Math.min(width, Math.max(X(s + d), x0 + 0.6));
        const row = depth[i], y = tops[lane] + row * ROW;
        if (x1 <= ends[lane][row]) return;
        ends[lane][row] = x1;
        g.fillStyle = fills[hues[lane]];
        g.globalAlpha = i === chosen ? 1 : 0.62 + 0.3 * (((name * 2654435761) >>> 0) / 4294967296);
        g.fillRect(x0, y, Math.max(0.6, x1 - x0 - (x1 - x0 > 4 ? 0.7 : 0)), ROW - 2);
        g.globalAlpha = 1;
        if (x1 - x0 > 1.2) hits.push([x0, x1, y, i]);
        if (x1 - x0 > 34) {
          g.fillStyle = "#fff";
          g.save();
          g.beginPath();
          g.rect(x0 + 3, y, x1 - x0 - 6, ROW);
          g.clip();
          g.fillText(t.names[name], x0 + 4, y + (ROW - 2) / 2 + 0.5);
          g.restore();
        }
      });
      g.fillStyle = css("card"); g.fillRect(0, 0, left - 4, height);
      let last = null;
      t.lanes.forEach((l, i) => {
        const y = tops[i] + ROW / 2 - 1;
        g.fillStyle = ink;
        g.font = `600 ${font}`;
        if (l.rank !== last) g.fillText(`rank ${l.rank}`, 0, y, 46);
        last = l.rank;
        g.font = font;
        g.fillStyle = soft; g.textAlign = "right";
        g.fillText(l.name, left - 10, y, left - 58);
        g.textAlign = "left";
      });
      totals();
    }
    let due = 0;
    function totals() {
      clearTimeout(due);
      due = setTimeout(() => {
        const sum = new Map();
        for (const [lane, name, s, d] of t.events) {
          if (hues[lane] === "faint") continue; // a step as a whole
          const part = Math.min(s + d, b) - Math.max(s, a);
          if (part <= 0) continue;
          const key = `${hues[lane]}|${name}`, o = sum.get(key) || { hue: hues[lane], name: t.names[name], n: 0, us: 0, most: 0 };
          o.n++; o.us += part; o.most = Math.max(o.most, d); sum.set(key, o);
        }
        const ranks = new Set(t.lanes.map((l) => l.rank)).size;
        const top = [...sum.values()].sort((p, q) => q.us - p.us).slice(0, 12);
        const line = (o) => el("tr", {}, cell(swatch(css(o.hue)), " ", o.name), num(String(o.n)), num(seconds(o.us / 1e6 / ranks)),
          num(percent(o.us / ranks / (b - a))), num(seconds(o.most / 1e6)));
        const all = ranks > 1 ? "in all, per rank" : "in all";
        const heads = columns(`in view (${seconds((b - a) / 1e6)})`, "times", all, "of the view", "longest");
        table.replaceChildren(el("table", {}, heads, el("tbody", {}, top.map(line))));
      }, 60);
    }
    function move(na, nb) {
      const least = 2;
      if (nb - na < least) { const m = (na + nb) / 2; na = m - least / 2; nb = m + least / 2; }
      if (na < 0) { nb -= na; na = 0; }
      if (nb > end) { na = Math.max(0, na - (nb - end)); nb = end; }
      a = na; b = nb;
      draw();
    }
    function zoomAt(f, px) {
      const m = px === undefined ? (a + b) / 2 : a + ((px - left) / ((canvas.clientWidth || 1) - left)) * (b - a);
      move(m - (m - a) * f, m + (b - m) * f);
    }
    const px = (e) => e.clientX - canvas.getBoundingClientRect().left;
    canvas.addEventListener("wheel", (e) => {
      if (!e.ctrlKey && !e.metaKey && document.activeElement !== canvas) return;
      e.preventDefault();
      const along = (e.deltaX / canvas.clientWidth) * (b - a);
      if (Math.abs(e.deltaX) > Math.abs(e.deltaY)) move(a + along, b + along);
      else zoomAt(Math.exp(Math.max(-0.5, Math.min(0.5, e.deltaY * 0.004))), px(e));
    }, { passive: false });
    const fingers = new Map();
    canvas.addEventListener("pointerdown", (e) => { fingers.set(e.pointerId, e.clientX); canvas.setPointerCapture(e.pointerId); });
    canvas.addEventListener("pointermove", (e) => {
      if (fingers.has(e.pointerId)) {
        const before = [...fingers.values()], per = (b - a) / (canvas.clientWidth - left);
        const was = fingers.get(e.pointerId);
        fingers.set(e.pointerId, e.clientX);
        const now = [...fingers.values()];
        if (now.length === 2) {
          const f = Math.abs(before[0] - before[1]) / Math.max(1, Math.abs(now[0] - now[1]));
          zoomAt(f, (now[0] + now[1]) / 2 - canvas.getBoundingClientRect().left);
        } else move(a - (e.clientX - was) * per, b - (e.clientX - was) * per);
        hideTip();
        return;
      }
      const box = canvas.getBoundingClientRect(), x = e.clientX - box.left, y = e.clientY - box.top;
      const hit = hits.findLast((q) => x >= q[0] - 1 && x <= q[1] + 1 && y >= q[2] && y < q[2] + ROW);
      if (!hit) { hideTip(); return; }
      const [lane, name, s, d] = t.events[hit[3]];
      const where = div("sub", `rank ${t.lanes[lane].rank}, ${t.lanes[lane].name}`);
      showTip(e.clientX, e.clientY, el("b", {}, t.names[name]), where, el("div", {}, `${seconds(d / 1e6)}, from ${seconds(s / 1e6)}`));
    });
    for (const kind of ["pointerup", "pointercancel"]) canvas.addEventListener(kind, (e) => fingers.delete(e.pointerId));
    canvas.addEventListener("pointerleave", hideTip);
    canvas.addEventListener("keydown", (e) => {
      const d = (b - a) * 0.15;
      const act = {
        ArrowLeft: () => move(a - d, b - d), ArrowRight: () => move(a + d, b + d), 0: () => move(0, end),
        "+": () => zoomAt(0.7), "=": () => zoomAt(0.7), "-": () => zoomAt(1.4),
      }[e.key];
      if (act) { e.preventDefault(); act(); }
    });
    function jump(e) {
      const s = t.steps[+e.target.value];
      if (s) move(s[0] - 0.03 * s[1], s[0] + 1.03 * s[1]);
    }
    const steps = t.steps.length > 1 ? el("select", { "aria-label": "go to a step", onchange: jump },
      el("option", { value: "" }, "go to …"), t.steps.map((s, i) => el("option", { value: i }, s[2]))) : null;
    const lanes = [...new Set(hues)].filter((k) => k !== "faint");
    const zooms = span("group", button("−", () => zoomAt(1.6)), button("+", () => zoomAt(0.6)), button("all", () => move(0, end)));
    const which = t.whole_steps ? "the last whole steps" : "the first ones";
    const shown = t.left_out ? `${short(t.total - t.left_out, 9)} of ${short(t.total, 9)} events are shown: ${which}.` : "";
    host.append(div("card timeline",
      div("bar", zooms, steps, el("span", {}, "drag to move; click, then turn the wheel to zoom")), canvas,
      legend(lanes.map((k) => [css(k), k])), shown ? sub(`${shown} The whole trace opens in ui.perfetto.dev.`) : null,
      el("div", { style: "margin-top:12px" }, table)));
    charts.push({ draw, of: "run" });
    draw();
  }

  // ---- memory -------------------------------------------------------------------------------------------------------------
  const CATEGORY = ["#3f74c4", "#e08a2e", "#3a9a68", "#8d5bb8", "#c74a40", "#2798ad", "#a98514", "#7a7f8c", "#b5477d"];
  const MEANING = {
    __proto__: null,
    process: "the ranks' own pages, all ranks", process_peak: "their high-water mark", shared: "what the ranks of a node share, once",
    gpu: "tensors on rank 0's GPU", gpu_peak: "their peak",
  };
  const track = (part, hue) => div("track", el("div", { style: `width:${100 * part}%;background:${hue}` }));
  function memory(host) {
    const m = run().memory, t = run().timeline;
    if (!m && !(t && t.counters.length)) { host.append(empty("memory")); return; }
    const e = m && m.predicted && Array.isArray(m.predicted.rows) ? m.predicted : null;
    const grid = el("div", { class: "grid" });
    host.append(grid);
    if (e) {
      const per = e.ranks_per_node || 1, whole = (r) => (r.host || 0) * per + (r.shared || 0);
      const positive = e.rows.map((r) => [r.name, whole(r)]).filter((r) => r[1] > 0);
      const sum = positive.reduce((p, r) => p + r[1], 0), freed = e.rows.reduce((p, r) => p + Math.min(0, r.host || 0) * per, 0);
      const hue = (i) => CATEGORY[i % CATEGORY.length];
      const part = ([n, v], i) => el("div", { style: `background:${hue(i)};width:${(100 * v) / sum}%`, title: `${n}: ${bytes(v)}` });
      const line = (r) => {
        const k = positive.findIndex((q) => q[0] === r.name), or = (v) => (v ? bytes(v) : "");
        return el("tr", {}, cell(k >= 0 ? [swatch(hue(k)), " "] : [], r.name), num(or(r.host)), num(or(r.shared)), num(bytes(whole(r))));
      };
      const card = div("card",
        titled("Memory plan of the node at its peak", span("now", `${bytes(e.node_peak)} above the process`)),
        div("stack", positive.map(part)),
        el("table", {}, columns("part", "each rank", "shared, once", "node"), el("tbody", {}, e.rows.map(line))));
      if (m && some(m.rank_peak) && some(m.planned)) {
        const most = Math.max(m.rank_peak, m.planned);
        const row = (name, v, c) => [el("div", {}, name), track(v / most, css(c)), el("div", {}, bytes(v))];
        card.append(el("h3", { style: "margin-top:14px" }, "Rank 0's own peak of the first step"));
        const against = [...row("plan", m.planned, "waiting"), ...row("measured", m.rank_peak, "compute")];
        card.append(el("div", { class: "hbars", id: "against", style: "margin-top:8px" }, against));
      }
      for (const n of e.notes || []) card.append(el("p", { class: "sub" }, n));
      if (freed) card.append(el("p", { class: "sub" }, "Negative: memory of the model that initialize frees."));
      grid.append(card);
    } else if (m && m.states.length) {
      const or = (v) => (v ? bytes(v) : ""), line = (r) => el("tr", {}, cell(r.name), num(or(r.host)), num(or(r.shared)));
      grid.append(div("card", titled("Memory plan: the model states"),
        el("table", { id: "states" }, columns("part", "each rank", "shared, once a node"), el("tbody", {}, m.states.map(line))),
        sub("Activations are not in it: ", el("code", {}, "initialize(sample_batch=...)"), " predicts them before the first step.")));
    }
    if (m && m.rows.length) {
      const all = m.rows.filter((r) => some(r.measured)), rows = all.filter((r) => !r.count); // of some a number, not bytes
      const used = rows.filter((r) => r.name !== "available");
      const most = Math.max(...used.map((r) => r.measured), 1), words = (r) => r.name.replaceAll("_", " ");
      const row = (r) =>
        [el("div", { title: MEANING[r.name] || "" }, words(r)), track(r.measured / most, css("compute")), el("div", {}, bytes(r.measured))];
      const meanings = rows.filter((r) => MEANING[r.name]).map((r) => `${words(r)}: ${MEANING[r.name]}`).join("; ");
      const left = [
        ...rows.filter((r) => r.name === "available").map((r) => `; least that was left on the node: ${bytes(r.least)}`),
        ...all.filter((r) => r.count).map((r) => `; ${words(r)}: ${short(r.measured, 9)}`),
      ].join("");
      grid.append(div("card", titled("Measured, the most of the run"),
        el("div", { class: "hbars", id: "measured" }, used.flatMap(row)), sub(meanings, left)));
      const names = Object.keys(m.over).filter((n) => m.over[n].value.length > 1);
      if (names.length) {
        const card = el("div", { class: "card" }, el("h3", {}, "Memory over the steps"));
        grid.append(card);
        const hue = (i) => CATEGORY[i % CATEGORY.length], spaced = (n) => n.replaceAll("_", " ");
        const lines = () => names.map((n, i) => ({ name: spaced(n), color: hue(i), x: m.over[n].step, y: m.over[n].value }));
        lineChart(card, lines, { format: bytes, zero: true, zoom: false, key: "memory", xformat: (v) => short(v, 6) });
        charts[charts.length - 1].of = "run";
        card.append(legend(names.map((n, i) => [hue(i), spaced(n)])));
      }
    }
    for (const c of t ? t.counters : []) {
      if (c.time.length < 2) continue;
      const most = Math.max(...c.values.map((v) => v.reduce((p, q) => p + q, 0)));
      const card = div("card", titled(`${c.name}, rank ${c.rank}, in the trace`, span("now", `most ${bytes(most)}`)));
      grid.append(card);
      areaChart(card, c);
      card.append(legend(c.keys.map((k, i) => [CATEGORY[i % CATEGORY.length], k.replaceAll("_", " ")])));
    }
  }
  function areaChart(host, c) {
    const box = el("div", { class: "chart" });
    host.append(box);
    function draw() {
      const width = Math.max(200, box.clientWidth), height = 180, left = 58, right = 8, top = 6, bottom = 22;
      const w = width - left - right, h = height - top - bottom;
      const x0 = c.time[0], x1 = c.time[c.time.length - 1] || 1;
      const max = Math.max(...c.values.map((v) => v.reduce((p, q) => p + q, 0))) || 1;
      const X = (x) => left + ((x - x0) / (x1 - x0 || 1)) * w, Y = (y) => top + (1 - y / max) * h;
      const svg = sv("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": c.name });
      const axis = sv("g", { class: "axis" });
      for (const t of byteTicks(0, max, 3)) {
        axis.append(sv("line", { x1: left, x2: width - right, y1: Y(t), y2: Y(t) }));
        axis.append(sv("text", { x: left - 7, y: Y(t) + 4, "text-anchor": "end" }, bytes(t)));
      }
      for (const t of ticks(x0, x1, Math.max(2, Math.round(w / 110)))) {
        axis.append(sv("text", { x: X(t), y: height - 6, "text-anchor": "middle" }, seconds(t / 1e6)));
      }
      svg.append(axis);
      c.keys.forEach((_, k) => {
        const below = c.values.map((v) => v.slice(0, k).reduce((p, q) => p + q, 0));
        const above = c.values.map((v, i) => below[i] + v[k]);
        let d = "";
        c.time.forEach((t, i) => {
          const x = X(t).toFixed(1), y = Y(above[i]).toFixed(1);
          d += i ? `H${x}V${y}` : `M${x} ${y}`;
        });
        for (let i = c.time.length - 1; i >= 0; i--) {
          d += `V${Y(below[i]).toFixed(1)}`;
          if (i < c.time.length - 1) d += `H${X(c.time[i]).toFixed(1)}`;
        }
        svg.append(sv("path", { d: `${d}z`, fill: CATEGORY[k % CATEGORY.length], opacity: 0.85 }));
      });
      box.replaceChildren(svg);
      box.onpointermove = (e) => {
        const i = nearest(c.time, x0 + ((e.clientX - box.getBoundingClientRect().left - left) / w) * (x1 - x0));
        const rows = c.keys.map((k, n) => tipRow(named(CATEGORY[n % CATEGORY.length], k), bytes(c.values[i][n])));
        showTip(e.clientX, e.clientY, div("sub", seconds(c.time[i] / 1e6)), rows);
      };
      box.onpointerleave = hideTip;
    }
    charts.push({ draw, of: "run" });
    draw();
  }

  // ---- tables -------------------------------------------------------------------------------------------------------------
  function sortable(fields, rows, id) {
    let by = null, up = false;
    const body = el("tbody");
    const fill = () => {
      const key = (row) => row[by] ?? -Infinity, order = up ? 1 : -1;
      const sorted = by === null ? rows : [...rows].sort((p, q) => (p[by] === q[by] ? 0 : key(p) < key(q) ? -order : order));
      const line = (r) => el("tr", {}, fields.map((c) => el("td", { class: c.text ? "" : "n" }, c.show(r[c.key], r))));
      body.replaceChildren(...sorted.map(line));
    };
    const sort = (c) => {
      up = by === c.key ? !up : !!c.text;
      by = c.key;
      heads.forEach((h, i) => h.setAttribute("aria-sort", fields[i] !== c ? "none" : up ? "ascending" : "descending"));
      fill();
    };
    const heads = fields.map((c) => el("th", {
      class: `sort${c.text ? "" : " n"}`, tabindex: 0, title: c.help || "sort", onclick: () => sort(c),
      onkeydown: (e) => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); e.target.click(); } },
    }, c.name));
    fill();
    return el("div", { class: "scroll" }, el("table", { id }, el("thead", {}, el("tr", {}, heads)), body));
  }
  const ms = (v) => (some(v) ? seconds(v / 1e3) : "–");
  function communication(host) {
    const c = run().communication;
    if (!c || !c.rows.length) {
      const key = el("code", {}, '{"comms_logger": {"enabled": true}}');
      host.append(empty("a table of communication (", key, " records one)"));
      return;
    }
    const share = (v) => span("delta", percent(c.total_ms ? v / c.total_ms : 0)), rate = (v) => (v ? `${short(v, 3)} Gbit/s` : "–");
    const fields = [
      { key: "op", name: "operation", text: true, show: (v) => v },
      { key: "bytes", name: "message", show: bytes },
      { key: "count", name: "calls", show: (v) => short(v, 6), help: "per rank" },
      { key: "total_ms", name: "in all", show: (v) => [ms(v), share(v)], help: "per rank, waiting for the others included" },
      { key: "avg_ms", name: "mean", show: ms, help: "without the lowest and highest tenth" },
      { key: "slowest_ms", name: "slowest rank", show: ms },
      { key: "bus_gbps", name: "bus", show: rate, help: "bandwidth as in nccl-tests" },
      { key: "algorithm_gbps", name: "algorithm", show: rate },
    ];
    const waiting = { key: "waiting_ms", name: "of it waiting", show: ms, help: "for the slowest rank to arrive" };
    if (c.rows.some((r) => some(r.waiting_ms))) fields.splice(4, 0, waiting);
    const over = `Means over ${c.ranks.length} rank${c.ranks.length > 1 ? "s" : ""}.`;
    host.append(div("card", sortable(fields, c.rows, "comms"), sub(`${over} Calls that run beside the computation are counted in full.`)));
  }
  function events(host) {
    const found = run().events;
    if (!found.length) { host.append(empty("events: no step was skipped, no warning was given")); return; }
    const fields = [
      { key: "step", name: "step", show: (v) => short(v, 9) },
      { key: "at", name: "after", show: seconds },
      { key: "kind", name: "what", text: true, show: (v) => span(`pill ${v}`, v) },
      { key: "text", name: "", text: true, show: (v) => v },
    ];
    host.append(div("card", sortable(fields, found, "happened")));
  }
  function configuration(host) {
    const r = run();
    const given = Object.keys(r.config).length > 0 && JSON.stringify(r.config).length < 1500;
    const config = folded("Configuration as it was given", el("pre", { id: "config" }, JSON.stringify(r.config, null, 2)), given);
    config.append(sub(el("code", {}, "deepc config check ds_config.json"), " explains its keys."));
    host.append(config);
    const text = (summary, content) => host.append(folded(summary, el("pre", {}, content)));
    const rest = Object.fromEntries(Object.entries(r.info).filter(([k]) => k !== "predicted" && k !== "plan"));
    if (Object.keys(rest).length) text("The run: versions, machine, batch", JSON.stringify(rest, null, 2));
    if (r.info.plan && r.info.plan.text) text("The plan: where each byte of the model states lies", r.info.plan.text);
    if (r.flops) text("Flops profile", r.flops);
  }

  // ---- the page -----------------------------------------------------------------------------------------------------------
  const DETAILS = [
    ["time", "Time of a step", time], ["pipeline", "Pipeline", pipeline], ["timeline", "Timeline", timeline], ["memory", "Memory", memory],
    ["communication", "Communication", communication], ["events", "Events", events], ["configuration", "Configuration", configuration],
  ];
  const missing = el("div", { class: "sub", id: "missing" });
  function drawRun() {
    for (let i = charts.length - 1; i >= 0; i--) if (charts[i].of === "run") charts.splice(i, 1);
    const absent = [];
    for (const [id, , fill] of DETAILS) {
      const body = sections[id];
      body.replaceChildren();
      fill(body);
      const said = body.children.length === 1 && body.firstChild.classList.contains("empty") ? body.firstChild : null;
      for (const node of [body, ...around[id]]) node.hidden = said !== null || !body.children.length;
      if (said) absent.push(el("li", {}, ...said.childNodes));
    }
    missing.replaceChildren(...(absent.length ? [el("p", {}, "Not in this run's folder:"), el("ul", {}, absent)] : []));
  }
  let stored = null;
  try { stored = localStorage.getItem("deepc-report-theme"); } catch { /* a file: page may have no storage */ }
  document.documentElement.dataset.theme = DATA.theme || stored || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  page.append(header());
  if (MANY) page.append(...comparison());
  else page.append(tiles(RUNS[0].summary), findings(RUNS[0]) || "");
  page.append(nav);
  page.append(...section("curves", "Curves"));
  curves(sections.curves);
  if (MANY) {
    const choose = (i) => (e) => {
      state.run = i;
      press(e.currentTarget);
      about();
      drawRun();
    };
    const buttons = RUNS.map((r, i) => button([swatch(color(i)), " ", r.name], choose(i), i === 0));
    const group = el("span", { class: "group", id: "chooser" }, buttons);
    const chooser = el("div", { class: "bar", style: "margin-top:30px" }, "Details of ", group);
    const facts = el("div");
    const about = () => facts.replaceChildren(tiles(run().summary), findings(run()) || "");
    page.append(chooser, facts);
    about();
  }
  for (const [id, name] of DETAILS) page.append(...section(id, name));
  page.append(missing);
  drawRun();
  const made = `Made by deepc ${DATA.version} on ${DATA.made}. This file is whole: it loads nothing. `;
  page.append(el("footer", {}, made, RUNS.map((r) => r.path).join(", ")));
  let width = page.clientWidth, wait = 0;
  new ResizeObserver(() => {
    if (page.clientWidth === width) return;
    width = page.clientWidth;
    clearTimeout(wait);
    wait = setTimeout(redraw, 60);
  }).observe(page);
  document.documentElement.dataset.ready = "yes";
})();
