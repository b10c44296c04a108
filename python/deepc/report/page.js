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
    if (v < 1e-3) return `${+(v * 1e6).toPrecision(3)} µs`;
    if (v < 1) return `${+(v * 1e3).toPrecision(3)} ms`;
    if (v < 120) return `${+v.toPrecision(3)} s`;
    if (v < 7200) return `${Math.floor(v / 60)} min ${Math.round(v % 60)} s`;
    return `${Math.floor(v / 3600)} h ${Math.round((v % 3600) / 60)} min`;
  }
  const percent = (v) => (some(v) ? `${+(100 * v).toPrecision(3)} %` : "–");
  const count = (v) => (!some(v) ? "–" : v >= 1e9 ? `${+(v / 1e9).toPrecision(3)} G` : v >= 1e6 ? `${+(v / 1e6).toPrecision(3)} M` : v >= 1e4 ? `${+(v / 1e3).toPrecision(3)} k` : String(v));
  const FORMATS = { time_s: seconds, fraction_of_peak: percent };
  const form = (name) => FORMATS[name] || short;
  const TITLES = { loss: "Loss", lr: "Learning rate", grad_norm: "Gradient norm", tokens_per_s: "Tokens / s", samples_per_s: "Samples / s", time_s: "Time of a step",
    loss_scale: "Loss scale", tflops: "TFLOP / s", fraction_of_peak: "Fraction of peak" };
  const title = (name) => TITLES[name] || name;

  function ticks(lo, hi, n) {
    const span = hi - lo || 1, raw = span / n, mag = 10 ** Math.floor(Math.log10(raw)), r = raw / mag;
    const step = (r >= 7 ? 10 : r >= 3 ? 5 : r >= 1.5 ? 2 : 1) * mag, out = [];
    for (let t = Math.ceil(lo / step - 1e-9) * step; t <= hi + step * 1e-9; t += step) out.push(Math.abs(t) < step * 1e-9 ? 0 : t);
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
  // series: () => [{name, color, x, y, marks}]; log: whether the values may be drawn on a log axis
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
      const drawn = all.map((s) => ({ ...s, ys: zoom ? smoothed(s.y, state.smooth) : s.y }));
      for (const s of drawn) s.ys.forEach((y, i) => { if (s.x[i] >= x0 && s.x[i] <= x1 && ok(y)) { y0 = Math.min(y0, y); y1 = Math.max(y1, y); } });
      if (y0 > y1) { y0 = log ? 0.1 : 0; y1 = 1; }
      if (zero && !log) y0 = Math.min(0, y0);
      if (y1 === y0) { const d = Math.abs(y0) * 0.1 || 1; y0 = log ? y0 / 2 : y0 - d; y1 = log ? y1 * 2 : y1 + d; }
      const f = log ? Math.log10 : (v) => v;
      const pad = (f(y1) - f(y0)) * 0.05, lo = f(y0) - (zero && y0 === 0 && !log ? 0 : pad), hi = f(y1) + pad;
      const X = (x) => left + ((x - x0) / (x1 - x0)) * w, Y = (y) => top + (1 - (f(y) - lo) / (hi - lo)) * h;
      const axis = sv("g", { class: "axis" });
      const yt = log ? logTicks(lo, hi) : (format === bytes ? byteTicks : ticks)(lo, hi, Math.max(2, Math.round(h / 42)));
      for (const t of yt) {
        const y = Y(t);
        axis.append(sv("line", { x1: left, x2: width - right, y1: y, y2: y }), sv("text", { x: left - 7, y: y + 4, "text-anchor": "end" }, format(t)));
      }
      const xf = xformat || (state.axis === "time" && zoom ? seconds : (v) => short(v, 6));
      for (const t of ticks(x0, x1, Math.max(2, Math.round(w / 110)))) axis.append(sv("text", { x: X(t), y: height - 6, "text-anchor": "middle" }, xf(t)));
      svg.append(axis);
      const clip = `c${Math.random().toString(36).slice(2)}`;
      const defs = sv("defs"), cp = sv("clipPath", { id: clip });
      cp.append(sv("rect", { x: left, y: 0, width: w, height: height }));
      defs.append(cp);
      const lines = sv("g", { "clip-path": `url(#${clip})` });
      svg.append(defs, lines);
      const path = (s, ys) => {
        let d = "", pen = false;
        s.x.forEach((x, i) => { if (!ok(ys[i])) { pen = false; return; } d += `${pen ? "L" : "M"}${X(x).toFixed(1)} ${Y(ys[i]).toFixed(1)}`; pen = true; });
        return d;
      };
      for (const s of drawn) {
        if (zoom && state.smooth) lines.append(sv("path", { d: path(s, s.y), fill: "none", stroke: s.color, "stroke-width": 1, opacity: 0.25 }));
        lines.append(sv("path", { d: path(s, s.ys), fill: "none", stroke: s.color, "stroke-width": 1.6, "stroke-linejoin": "round", "stroke-dasharray": s.dash || "none" }));
        if (s.x.length === 1 && ok(s.ys[0])) lines.append(sv("circle", { cx: X(s.x[0]), cy: Y(s.ys[0]), r: 3, fill: s.color }));
        for (const m of s.marks || []) lines.append(sv("line", { x1: X(m), x2: X(m), y1: height - bottom, y2: height - bottom - 9, stroke: css("bad"), "stroke-width": 1.5 }));
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
        view.brush.setAttribute("x", Math.min(from, px)); view.brush.setAttribute("width", Math.abs(px - from)); view.brush.setAttribute("visibility", "visible");
      }
      const rows = view.drawn.map((s) => {
        const i = nearest(s.x, x);
        return el("div", { class: "row" }, el("span", {}, swatch(s.color), " ", s.name), el("b", {}, format(s.y[i])));
      });
      const s0 = view.drawn[0];
      showTip(e.clientX, e.clientY, el("div", { class: "sub" }, `${xformat || state.axis === "time" ? "at" : "step"} ${view.xf(s0.x[nearest(s0.x, x)])}`), rows);
    });
    box.addEventListener("pointerleave", () => { hideTip(); if (view) { view.cross.setAttribute("visibility", "hidden"); } });
    if (zoom) {
      box.addEventListener("pointerdown", (e) => { if (e.pointerType === "mouse" && view) from = at(e); });
      addEventListener("pointerup", (e) => {
        if (from === null || !view) return;
        const a = view.inverse(from), b = view.inverse(Math.max(view.left, Math.min(view.left + view.w, at(e)))), far = Math.abs(at(e) - from) > 6;
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
    for (let e = Math.floor(lo); e <= Math.ceil(hi); e++) for (const m of hi - lo < 1.5 ? [1, 2, 5] : [1]) { const v = m * 10 ** e; if (Math.log10(v) >= lo && Math.log10(v) <= hi) out.push(v); }
    return out.length > 1 ? out : ticks(10 ** lo, 10 ** hi, 3).filter((t) => t > 0);
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
  const sections = {};
  function section(id, name) {
    const body = el("div");
    nav.append(el("a", { href: `#${id}` }, name));
    sections[id] = body;
    return [el("h2", { id }, name), body];
  }
  const empty = (...text) => el("div", { class: "card empty" }, ...text);
  const run = () => RUNS[state.run];

  function header() {
    const r = RUNS[0], i = r.info, s = r.summary;
    const facts = [];
    if (!MANY) {
      if (s.model) facts.push(el("b", {}, s.model));
      if (some(s.parameters)) facts.push(`${count(s.parameters)} parameters${some(s.trainable) && s.trainable !== s.parameters ? ` (${count(s.trainable)} trained)` : ""}`);
      if (s.stage !== null && s.stage !== undefined) facts.push(`ZeRO stage ${s.stage}`);
      if (s.precision) facts.push(String(s.precision));
      if (s.ranks) facts.push(`${s.ranks} rank${s.ranks > 1 ? "s" : ""}${s.nodes > 1 ? ` on ${s.nodes} nodes` : ""}${i.host ? ` on ${i.host}` : ""}`);
      if (i.device) facts.push(String(i.device));
      if (i.started) facts.push(`started ${String(i.started).slice(0, 19).replace("T", " ")}`);
      const versions = ["deepc", "torch", "Python"].filter((k) => typeof i[k.toLowerCase()] === "string").map((k) => `${k} ${i[k.toLowerCase()]}`);
      if (versions.length) facts.push(versions.join(", "));
    } else facts.push(RUNS.map((x) => x.name).join(", "));
    const theme = el("button", { type: "button", "aria-label": "dark or light", onclick: () => {
      const d = document.documentElement, dark = d.dataset.theme !== "dark";
      d.dataset.theme = dark ? "dark" : "light";
      try { localStorage.setItem("deepc-report-theme", d.dataset.theme); } catch { /* a file: page may have no storage */ }
      redraw(); drawRun();
    } }, "◐");
    return el("header", { class: "top" }, el("div", {}, el("div", { class: "kicker" }, MANY ? "deepc: comparison of runs" : "deepc: report of a run"),
      el("h1", {}, MANY ? `${RUNS.length} runs` : r.name), el("div", { class: "sub" }, facts.flatMap((f, n) => (n ? [" · ", f] : [f])))), theme);
  }

  function tiles(s) {
    const out = [];
    const tile = (label, value, more) => out.push(el("div", { class: "tile" }, el("div", { class: "label" }, label), el("div", { class: "value" }, value), el("div", { class: "more" }, more || " ")));
    const unit = (v, u) => [v, " ", el("small", {}, u)];
    if (some(s.loss)) tile("Loss", short(s.loss), `from ${short(s.first_loss)}`);
    if (some(s.tokens_per_s)) tile("Tokens / s", short(s.tokens_per_s, 3), "median");
    else if (some(s.samples_per_s)) tile("Samples / s", short(s.samples_per_s, 3), "median");
    if (some(s.step_s)) tile("Time of a step", seconds(s.step_s), `slowest ${seconds(s.slowest_s)}`);
    if (some(s.tflops)) tile("TFLOP / s", short(s.tflops, 3), some(s.fraction_of_peak) ? `${percent(s.fraction_of_peak)} of peak` : "median");
    if (some(s.waiting)) tile("Waiting", percent(s.waiting), "of a step");
    if (some(s.peak_bytes)) { const [v, u] = bytes(s.peak_bytes).split(" "); tile("Memory", unit(v, u), "largest measured"); }
    tile("Steps", short(s.steps, 9), [s.skipped ? `${s.skipped} skipped` : "none skipped", some(s.duration_s) ? `, ${seconds(s.duration_s)}` : ""].join(""));
    return el("div", { class: "tiles" }, out);
  }

  function findings(r) {
    if (!r.findings.length) return null;
    const rank = { bad: 0, note: 1, good: 2 };
    return el("ul", { class: "findings" }, [...r.findings].sort((a, b) => rank[a.level] - rank[b.level]).map((f) =>
      el("li", { class: f.level }, f.text, f.fix ? el("span", { class: "fix" }, ` – ${f.fix}`) : null)));
  }

  // ---- comparison ---------------------------------------------------------------------------------------------------------
  const ROWS = [["loss", "last loss", short, -1], ["tail_loss", "loss, mean of the last 5 %", short, -1], ["best_loss", "best loss", short, -1], ["tokens_per_s", "tokens / s", short, 1],
    ["samples_per_s", "samples / s", short, 1], ["step_s", "time of a step", seconds, -1], ["tflops", "TFLOP / s", short, 1], ["fraction_of_peak", "fraction of peak", percent, 1],
    ["waiting", "waiting", percent, -1], ["peak_bytes", "memory", bytes, -1], ["skipped", "skipped steps", short, 0], ["steps", "steps", short, 0], ["duration_s", "duration", seconds, 0],
    ["parameters", "parameters", count, 0], ["ranks", "ranks", short, 0], ["stage", "ZeRO stage", short, 0], ["precision", "precision", String, 0]];
  function comparison() {
    const clear = (v, best) => some(best) && (v === best || Math.abs(v / best - 1) < 0.01);
    const table = el("table", { id: "comparison" }, el("thead", {}, el("tr", {}, el("th"), RUNS.map((r, i) => el("th", { class: "n" }, swatch(color(i)), " ", r.name)))));
    const body = el("tbody");
    for (const [key, name, f, better] of ROWS) {
      const vs = RUNS.map((r) => r.summary[key]);
      if (vs.every((v) => v === null || v === undefined || v === "")) continue;
      const numbers = vs.filter(some), best = better && numbers.length > 1 ? (better > 0 ? Math.max(...numbers) : Math.min(...numbers)) : NaN;
      const all = numbers.every((v) => clear(v, best)); // a difference below 1 % is none
      body.append(el("tr", {}, el("td", {}, name), vs.map((v, i) => {
        const relative = i && better && some(v) && some(vs[0]) && vs[0] ? v / vs[0] - 1 : NaN;
        return el("td", { class: `n${!all && some(v) && clear(v, best) ? " best" : ""}` }, v === null || v === undefined || v === "" ? "–" : f(v),
          some(relative) ? el("span", { class: "delta" }, `${relative >= 0 ? "+" : "−"}${Math.abs(100 * relative).toFixed(1)} %`) : null);
      })));
    }
    table.append(body);
    const out = [el("div", { class: "card", style: "margin-top:16px" }, el("div", { class: "scroll" }, table))];
    const flat = (o, p, into) => { for (const [k, v] of Object.entries(o || {})) { const n = p ? `${p}.${k}` : k; if (v && typeof v === "object" && !Array.isArray(v)) flat(v, n, into); else into[n] = JSON.stringify(v); } return into; };
    const configs = RUNS.map((r) => flat(r.config, "", {}));
    const keys = [...new Set(configs.flatMap(Object.keys))].sort().filter((k) => k !== "deepc.run_dir" && new Set(configs.map((c) => c[k])).size > 1);
    if (keys.length) out.push(el("div", { class: "card" }, el("h3", {}, "Where the configurations differ"), el("div", { class: "scroll" }, el("table", { id: "differences" }, el("thead", {}, el("tr", {}, el("th"), RUNS.map((r, i) => el("th", { class: "n" }, swatch(color(i)), " ", r.name)))), el("tbody", {}, keys.map((k) =>
      el("tr", {}, el("td", { class: "key" }, k), configs.map((c) => el("td", { class: "n key" }, c[k] === undefined ? "–" : c[k])))))))));
    return out;
  }

  // ---- curves -------------------------------------------------------------------------------------------------------------
  const MAIN = ["loss", "lr", "grad_norm", "tokens_per_s", "time_s", "loss_scale", "eval_loss"];
  function curves(host) {
    const names = [...new Set(RUNS.flatMap((r) => Object.keys(r.curves)))];
    if (!names.length) { host.append(empty("No steps were recorded. A run writes them when its configuration has ", el("code", {}, '{"deepc": {"run_dir": "runs/name"}}'), ".")); return; }
    const axis = (name, label) => el("button", { type: "button", "aria-pressed": String(state.axis === name), onclick: (e) => {
      state.axis = name; state.domain = null;
      for (const b of e.target.parentNode.children) b.setAttribute("aria-pressed", String(b === e.target));
      redraw();
    } }, label);
    const range = el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: 0, "aria-label": "smoothing", oninput: (e) => { state.smooth = +e.target.value; redraw(); } });
    const bar = el("div", { class: "bar" }, el("span", { class: "group" }, axis("step", "by step"), axis("time", "by time")), el("label", {}, "smoothing", range),
      el("button", { type: "button", onclick: () => { state.domain = null; redraw(); } }, "whole run"), el("span", {}, "drag over a chart to zoom all"));
    if (MANY) bar.append(el("span", { class: "legend", style: "margin:0" }, RUNS.map((r, i) => el("button", { type: "button", onclick: (e) => {
      if (state.hidden.has(i)) state.hidden.delete(i); else state.hidden.add(i);
      e.currentTarget.style.opacity = state.hidden.has(i) ? 0.4 : 1;
      redraw();
    } }, swatch(color(i)), " ", r.name))));
    const grid = el("div", { class: "grid" }), rest = el("div", { class: "grid" });
    host.append(bar, grid);
    const first = new Set(names.filter((n) => MAIN.includes(n) && RUNS.some((r) => r.curves[n] && (n !== "loss_scale" || new Set(r.curves[n].value).size > 1))));
    if (!first.has("tokens_per_s") && names.includes("samples_per_s")) first.add("samples_per_s");
    for (const name of names) {
      const has = RUNS.filter((r) => r.curves[name]);
      const now = el("span", { class: "now" }, MANY ? "" : (() => { const v = has[0].curves[name].value; return `last ${form(name)(v[v.length - 1])}`; })());
      const logb = el("button", { type: "button", "aria-pressed": "false", onclick: () => {
        if (state.log.has(name)) state.log.delete(name); else state.log.add(name);
        logb.setAttribute("aria-pressed", String(state.log.has(name)));
        redraw();
      } }, "log");
      const card = el("div", { class: "card", "data-curve": name }, el("div", { class: "head" }, el("h3", {}, title(name)), el("span", {}, now, " ", logb)));
      (first.has(name) || !first.size ? grid : rest).append(card);
      lineChart(card, () => RUNS.flatMap((r, i) => {
        const c = r.curves[name];
        if (!c || state.hidden.has(i)) return [];
        const xs = state.axis === "time" ? c.time : c.step;
        const marks = name === "loss" || name === "loss_scale" || name === "grad_norm" ? r.skipped.map((k) => (state.axis === "time" ? c.time[nearest(c.step, k.step)] : k.step)) : [];
        return [{ name: MANY ? r.name : title(name), color: MANY ? color(i) : css("accent"), x: xs, y: c.value, marks }];
      }), { format: form(name), key: name });
    }
    if (rest.children.length) host.append(el("details", { class: "more", ontoggle: redraw }, el("summary", {}, `${rest.children.length} more: ${names.filter((n) => first.size && !first.has(n)).map(title).join(", ")}`), rest));
    if (RUNS.some((r) => r.skipped.length)) host.append(el("div", { class: "legend" }, el("span", {}, swatch(css("bad")), "ticks at the bottom: skipped steps")));
  }

  // ---- time of a step -----------------------------------------------------------------------------------------------------
  const PARTS = ["compute", "communication", "data", "disk"];
  function time(host) {
    const rows = MANY ? RUNS : [run()];
    const withSplit = rows.filter((r) => r.split);
    if (!withSplit.length) { host.append(empty("metrics.jsonl does not say how long the steps waited.")); return; }
    const longest = Math.max(...withSplit.map((r) => PARTS.reduce((a, p) => a + r.split.mean[p], 0)));
    const bars = el("div", { class: "hbars" });
    for (const r of withSplit) {
      const total = PARTS.reduce((a, p) => a + r.split.mean[p], 0);
      bars.append(el("div", {}, MANY ? r.name : "mean step"), el("div", { class: "track", style: "height:26px" }, PARTS.map((p) => el("div", { style: `background:${css(p)};width:${(100 * r.split.mean[p]) / longest}%`, title: `${p}: ${seconds(r.split.mean[p])}` }))),
        el("div", {}, seconds(total)));
    }
    const r = run(), mean = r.split ? r.split.mean : null, total = mean ? PARTS.reduce((a, p) => a + mean[p], 0) : 0;
    const card = el("div", { class: "card" }, bars, el("div", { class: "legend" }, PARTS.map((p) => el("span", {}, swatch(css(p)), mean ? `${p} ${seconds(mean[p])} (${percent(total ? mean[p] / total : 0)})` : p))));
    host.append(card);
    if (r.split && r.split.step.length > 1) {
      const more = el("div", { class: "card" }, el("div", { class: "head" }, el("h3", {}, "Step by step"), el("span", { class: "now" }, MANY ? r.name : "")));
      host.append(more);
      stackedBars(more, r.split);
    }
  }
  function stackedBars(host, split) {
    const box = el("div", { class: "chart" });
    host.append(box);
    function draw() {
      const width = Math.max(200, box.clientWidth), height = 170, left = 54, right = 8, top = 6, bottom = 22, w = width - left - right, h = height - top - bottom, n = split.step.length;
      const totals = split.step.map((_, i) => PARTS.reduce((a, p) => a + split.parts[p][i], 0));
      const sorted = [...totals].sort((a, b) => a - b), max = Math.min(sorted[n - 1], sorted[Math.floor(0.98 * (n - 1))] * 1.6) || 1;
      const svg = sv("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "time of each step" }), axis = sv("g", { class: "axis" });
      const Y = (v) => top + (1 - Math.min(v, max) / max) * h;
      for (const t of ticks(0, max, 3)) axis.append(sv("line", { x1: left, x2: width - right, y1: Y(t), y2: Y(t) }), sv("text", { x: left - 7, y: Y(t) + 4, "text-anchor": "end" }, seconds(t)));
      const each = w / n, gap = each > 4 ? 1 : 0;
      for (const t of ticks(0, n - 1, Math.max(2, Math.round(w / 110)))) if (Number.isInteger(t)) axis.append(sv("text", { x: left + (t + 0.5) * each, y: height - 6, "text-anchor": "middle" }, short(split.step[t], 6)));
      svg.append(axis);
      for (const [k, p] of PARTS.entries()) {
        let d = "";
        split.step.forEach((_, i) => {
          const below = PARTS.slice(0, k).reduce((a, q) => a + split.parts[q][i], 0), y0 = Y(below), y1 = Y(below + split.parts[p][i]), x = left + i * each;
          if (y0 - y1 > 0.05) d += `M${x.toFixed(2)} ${y0.toFixed(2)}h${(each - gap).toFixed(2)}V${y1.toFixed(2)}h${(gap - each).toFixed(2)}z`;
        });
        svg.append(sv("path", { d, fill: css(p) }));
      }
      box.replaceChildren(svg);
      box.onpointermove = (e) => {
        const i = Math.floor((e.clientX - box.getBoundingClientRect().left - left) / each);
        if (i < 0 || i >= n) { hideTip(); return; }
        showTip(e.clientX, e.clientY, el("div", { class: "sub" }, split.to[i] > split.step[i] ? `steps ${split.step[i]} to ${split.to[i]}, mean` : `step ${split.step[i]}`),
          PARTS.map((p) => el("div", { class: "row" }, el("span", {}, swatch(css(p)), " ", p), el("b", {}, seconds(split.parts[p][i])))), el("div", { class: "row" }, el("span", {}, "all"), el("b", {}, seconds(totals[i]))));
      };
      box.onpointerleave = hideTip;
    }
    charts.push({ draw, of: "run" });
    draw();
  }

  // ---- timeline -----------------------------------------------------------------------------------------------------------
  function laneColor(lane) {
    const n = lane.toLowerCase();
    return n === "steps" ? "faint" : n === "modules" ? "modules" : /comm|nccl|gloo|reduce|gather/.test(n) ? "communication" : /disk|io\b|nvme|file/.test(n) ? "disk" : /wait|idle/.test(n) ? "waiting" : /data|load/.test(n) ? "data" : "compute";
  }
  function timeline(host) {
    const t = run().timeline;
    if (!t) { host.append(empty("No trace was recorded. ", el("code", {}, "docs/profiling.md"), " tells how to record one.")); return; }
    // nested events of a lane lie one below the other
    const depth = new Array(t.events.length), open = t.lanes.map(() => []), rows = t.lanes.map(() => 1), hues = t.lanes.map((l) => laneColor(l.name));
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
    if (t.steps.length > 2) { const s = t.steps[Math.floor(t.steps.length / 2)]; a = Math.max(0, s[0] - 0.1 * s[1]); b = Math.min(end, s[0] + 1.1 * s[1]); }
    const ROW = 15, GAP = 7, HEAD = 24, tops = [];
    let height = HEAD, lastRank = null;
    t.lanes.forEach((l, i) => { if (l.rank !== lastRank) { height += lastRank === null ? 0 : 8; lastRank = l.rank; } tops[i] = height; height += rows[i] * ROW + GAP; });
    let left = 120, hits = [];
    function draw() {
      const width = canvas.clientWidth || 600, ratio = devicePixelRatio || 1, g = canvas.getContext("2d");
      left = width < 560 ? 74 : 150;
      canvas.width = width * ratio; canvas.height = height * ratio; canvas.style.height = `${height}px`;
      g.setTransform(ratio, 0, 0, ratio, 0, 0);
      g.clearRect(0, 0, width, height);
      const w = width - left, X = (u) => left + ((u - a) / (b - a)) * w, ink = css("ink"), soft = css("soft"), grid = css("grid");
      g.font = "11px system-ui, sans-serif";
      g.textBaseline = "middle";
      t.steps.forEach(([s, d, name], k) => { if (X(s + d) > left && X(s) < width && k % 2 === 0) { g.fillStyle = css("hover"); g.fillRect(Math.max(left, X(s)), HEAD - 6, X(s + d) - Math.max(left, X(s)), height); } });
      g.strokeStyle = grid; g.fillStyle = soft; g.textAlign = "center";
      for (const k of ticks(a, b, Math.max(2, Math.round(w / 120)))) { const x = X(k); g.beginPath(); g.moveTo(x, HEAD - 6); g.lineTo(x, height); g.stroke(); if (x > left + 20 && x < width - 20) g.fillText(seconds(k / 1e6), x, 9); }
      hits = [];
      const fills = Object.fromEntries(["compute", "communication", "data", "disk", "waiting", "modules", "faint"].map((k) => [k, css(k)]));
      g.textAlign = "left";
      // what is thinner than a pixel is drawn once per pixel: `ends` is where the lane's row is already painted
      const ends = t.lanes.map((_, i) => new Float32Array(rows[i]).fill(-1));
      t.events.forEach(([lane, name, s, d], i) => {
        if (s + d < a || s > b) return;
        const x0 = Math.max(left, X(s)), x1 = Math.min(width, Math.max(X(s + d), x0 + 0.6)), row = depth[i], y = tops[lane] + row * ROW;
        if (x1 <= ends[lane][row]) return;
        ends[lane][row] = x1;
        g.fillStyle = fills[hues[lane]];
        g.globalAlpha = i === chosen ? 1 : 0.62 + 0.3 * (((name * 2654435761) >>> 0) / 4294967296);
        g.fillRect(x0, y, Math.max(0.6, x1 - x0 - (x1 - x0 > 4 ? 0.7 : 0)), ROW - 2);
        g.globalAlpha = 1;
        if (x1 - x0 > 1.2) hits.push([x0, x1, y, i]);
        if (x1 - x0 > 34) { g.fillStyle = "#fff"; g.save(); g.beginPath(); g.rect(x0 + 3, y, x1 - x0 - 6, ROW); g.clip(); g.fillText(t.names[name], x0 + 4, y + (ROW - 2) / 2 + 0.5); g.restore(); }
      });
      g.fillStyle = css("card"); g.fillRect(0, 0, left - 4, height);
      let last = null;
      t.lanes.forEach((l, i) => {
        g.fillStyle = ink;
        if (l.rank !== last) { g.font = "600 11px system-ui, sans-serif"; g.fillText(`rank ${l.rank}`, 0, tops[i] + ROW / 2 - 1, 46); last = l.rank; g.font = "11px system-ui, sans-serif"; }
        g.fillStyle = soft; g.textAlign = "right"; g.fillText(l.name, left - 10, tops[i] + ROW / 2 - 1, left - 58); g.textAlign = "left";
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
        table.replaceChildren(el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, `in view (${seconds((b - a) / 1e6)})`), el("th", { class: "n" }, "times"), el("th", { class: "n" }, ranks > 1 ? "in all, per rank" : "in all"), el("th", { class: "n" }, "of the view"), el("th", { class: "n" }, "longest"))),
          el("tbody", {}, top.map((o) => el("tr", {}, el("td", {}, swatch(css(o.hue)), " ", o.name), el("td", { class: "n" }, String(o.n)), el("td", { class: "n" }, seconds(o.us / 1e6 / ranks)), el("td", { class: "n" }, percent(o.us / ranks / (b - a))), el("td", { class: "n" }, seconds(o.most / 1e6)))))));
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
    const zoomAt = (f, px) => { const m = px === undefined ? (a + b) / 2 : a + ((px - left) / ((canvas.clientWidth || 1) - left)) * (b - a); move(m - (m - a) * f, m + (b - m) * f); };
    const px = (e) => e.clientX - canvas.getBoundingClientRect().left;
    canvas.addEventListener("wheel", (e) => {
      if (!e.ctrlKey && !e.metaKey && document.activeElement !== canvas) return;
      e.preventDefault();
      if (Math.abs(e.deltaX) > Math.abs(e.deltaY)) move(a + (e.deltaX / canvas.clientWidth) * (b - a), b + (e.deltaX / canvas.clientWidth) * (b - a));
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
        if (now.length === 2) { const f = Math.abs(before[0] - before[1]) / Math.max(1, Math.abs(now[0] - now[1])); zoomAt(f, (now[0] + now[1]) / 2 - canvas.getBoundingClientRect().left); }
        else move(a - (e.clientX - was) * per, b - (e.clientX - was) * per);
        hideTip();
        return;
      }
      const box = canvas.getBoundingClientRect(), x = e.clientX - box.left, y = e.clientY - box.top;
      const hit = hits.findLast((q) => x >= q[0] - 1 && x <= q[1] + 1 && y >= q[2] && y < q[2] + ROW);
      if (!hit) { hideTip(); return; }
      const [lane, name, s, d] = t.events[hit[3]];
      showTip(e.clientX, e.clientY, el("b", {}, t.names[name]), el("div", { class: "sub" }, `rank ${t.lanes[lane].rank}, ${t.lanes[lane].name}`), el("div", {}, `${seconds(d / 1e6)}, from ${seconds(s / 1e6)}`));
    });
    for (const kind of ["pointerup", "pointercancel"]) canvas.addEventListener(kind, (e) => fingers.delete(e.pointerId));
    canvas.addEventListener("pointerleave", hideTip);
    canvas.addEventListener("keydown", (e) => {
      const d = (b - a) * 0.15;
      const act = { ArrowLeft: () => move(a - d, b - d), ArrowRight: () => move(a + d, b + d), "+": () => zoomAt(0.7), "=": () => zoomAt(0.7), "-": () => zoomAt(1.4), 0: () => move(0, end) }[e.key];
      if (act) { e.preventDefault(); act(); }
    });
    const button = (label, what) => el("button", { type: "button", onclick: what }, label);
    const jump = t.steps.length > 1 ? el("select", { "aria-label": "go to a step", onchange: (e) => { const s = t.steps[+e.target.value]; if (s) move(s[0] - 0.03 * s[1], s[0] + 1.03 * s[1]); } }, el("option", { value: "" }, "go to …"), t.steps.map((s, i) => el("option", { value: i }, s[2]))) : null;
    const lanes = [...new Set(hues)].filter((k) => k !== "faint");
    host.append(el("div", { class: "card timeline" }, el("div", { class: "bar" }, el("span", { class: "group" }, button("−", () => zoomAt(1.6)), button("+", () => zoomAt(0.6)), button("all", () => move(0, end))), jump,
      el("span", {}, "drag to move; click, then turn the wheel to zoom")), canvas,
      el("div", { class: "legend" }, lanes.map((k) => el("span", {}, swatch(css(k)), k))), t.left_out ? el("p", { class: "sub" }, `${short(t.total - t.left_out, 9)} of ${short(t.total, 9)} events are shown: the last whole steps. The whole trace opens in ui.perfetto.dev.`) : null,
      el("div", { style: "margin-top:12px" }, table)));
    charts.push({ draw, of: "run" });
    draw();
  }

  // ---- memory -------------------------------------------------------------------------------------------------------------
  const CATEGORY = ["#3f74c4", "#e08a2e", "#3a9a68", "#8d5bb8", "#c74a40", "#2798ad", "#a98514", "#7a7f8c", "#b5477d"];
  const MEANING = { process: "the ranks' own pages, all ranks", process_peak: "their high-water mark", shared: "what the ranks of a node share, once", gpu: "tensors on rank 0's GPU", gpu_peak: "their peak" };
  function memory(host) {
    const m = run().memory, t = run().timeline;
    if (!m && !(t && t.counters.length)) { host.append(empty("The run recorded no memory.")); return; }
    const e = m && m.predicted && m.predicted.rows ? m.predicted : null;
    const grid = el("div", { class: "grid" });
    host.append(grid);
    if (e) {
      const per = e.ranks_per_node || 1, positive = e.rows.map((r) => [r.name, (r.host || 0) * per + (r.shared || 0)]).filter((r) => r[1] > 0);
      const sum = positive.reduce((p, r) => p + r[1], 0), freed = e.rows.reduce((p, r) => p + Math.min(0, r.host || 0) * per, 0);
      const card = el("div", { class: "card" }, el("div", { class: "head" }, el("h3", {}, "Memory plan of the node at its peak"), el("span", { class: "now" }, `${bytes(e.node_peak)} above the process`)),
        el("div", { class: "stack" }, positive.map(([n, v], i) => el("div", { style: `background:${CATEGORY[i % CATEGORY.length]};width:${(100 * v) / sum}%`, title: `${n}: ${bytes(v)}` }))),
        el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, "part"), el("th", { class: "n" }, "each rank"), el("th", { class: "n" }, "shared, once"), el("th", { class: "n" }, "node"))),
          el("tbody", {}, e.rows.map((r) => { const k = positive.findIndex((q) => q[0] === r.name); return el("tr", {}, el("td", {}, k >= 0 ? [swatch(CATEGORY[k % CATEGORY.length]), " "] : [], r.name), el("td", { class: "n" }, r.host ? bytes(r.host) : ""), el("td", { class: "n" }, r.shared ? bytes(r.shared) : ""),
            el("td", { class: "n" }, bytes((r.host || 0) * per + (r.shared || 0)))); }))));
      if (m && some(m.rank_peak) && some(m.planned)) {
        const most = Math.max(m.rank_peak, m.planned), row = (name, v, c) => [el("div", {}, name), el("div", { class: "track" }, el("div", { style: `width:${(100 * v) / most}%;background:${css(c)}` })), el("div", {}, bytes(v))];
        card.append(el("h3", { style: "margin-top:14px" }, "Rank 0's peak of the first step, shared memory included"), el("div", { class: "hbars", id: "against", style: "margin-top:8px" }, row("plan", m.planned, "waiting"), row("measured", m.rank_peak, "compute")));
      }
      for (const n of e.notes || []) card.append(el("p", { class: "sub" }, n));
      if (freed) card.append(el("p", { class: "sub" }, "Negative: memory of the model that initialize frees."));
      grid.append(card);
    }
    if (m && m.rows.length) {
      const rows = m.rows.filter((r) => some(r.measured)), most = Math.max(...rows.filter((r) => r.name !== "available").map((r) => r.measured), 1), what = MEANING;
      grid.append(el("div", { class: "card" }, el("div", { class: "head" }, el("h3", {}, "Measured, the most of the run")),
        el("div", { class: "hbars", id: "measured" }, rows.filter((r) => r.name !== "available").flatMap((r) => [el("div", { title: what[r.name] || "" }, r.name.replaceAll("_", " ")),
          el("div", { class: "track" }, el("div", { style: `width:${(100 * r.measured) / most}%;background:${css("compute")}` })), el("div", {}, bytes(r.measured))])),
        el("p", { class: "sub" }, rows.filter((r) => what[r.name]).map((r) => `${r.name.replaceAll("_", " ")}: ${what[r.name]}`).join("; "), rows.filter((r) => r.name === "available").map((r) => `; least that was left on the node: ${bytes(r.least)}`).join(""))));
      const names = Object.keys(m.over).filter((n) => m.over[n].value.length > 1);
      if (names.length) {
        const card = el("div", { class: "card" }, el("h3", {}, "Memory over the steps"));
        grid.append(card);
        lineChart(card, () => names.map((n, i) => ({ name: n.replaceAll("_", " "), color: CATEGORY[i % CATEGORY.length], x: m.over[n].step, y: m.over[n].value })), { format: bytes, zero: true, zoom: false, key: "memory", xformat: (v) => short(v, 6) });
        charts[charts.length - 1].of = "run";
        card.append(el("div", { class: "legend" }, names.map((n, i) => el("span", {}, swatch(CATEGORY[i % CATEGORY.length]), n.replaceAll("_", " ")))));
      }
    }
    for (const c of t ? t.counters : []) {
      if (c.time.length < 2) continue;
      const card = el("div", { class: "card" }, el("div", { class: "head" }, el("h3", {}, `${c.name}, rank ${c.rank}, in the trace`), el("span", { class: "now" }, `most ${bytes(Math.max(...c.values.map((v) => v.reduce((p, q) => p + q, 0))))}`)));
      grid.append(card);
      areaChart(card, c);
      card.append(el("div", { class: "legend" }, c.keys.map((k, i) => el("span", {}, swatch(CATEGORY[i % CATEGORY.length]), k.replaceAll("_", " ")))));
    }
  }
  function areaChart(host, c) {
    const box = el("div", { class: "chart" });
    host.append(box);
    function draw() {
      const width = Math.max(200, box.clientWidth), height = 180, left = 58, right = 8, top = 6, bottom = 22, w = width - left - right, h = height - top - bottom;
      const x0 = c.time[0], x1 = c.time[c.time.length - 1] || 1, max = Math.max(...c.values.map((v) => v.reduce((p, q) => p + q, 0))) || 1;
      const X = (x) => left + ((x - x0) / (x1 - x0 || 1)) * w, Y = (y) => top + (1 - y / max) * h;
      const svg = sv("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": c.name }), axis = sv("g", { class: "axis" });
      for (const t of byteTicks(0, max, 3)) axis.append(sv("line", { x1: left, x2: width - right, y1: Y(t), y2: Y(t) }), sv("text", { x: left - 7, y: Y(t) + 4, "text-anchor": "end" }, bytes(t)));
      for (const t of ticks(x0, x1, Math.max(2, Math.round(w / 110)))) axis.append(sv("text", { x: X(t), y: height - 6, "text-anchor": "middle" }, seconds(t / 1e6)));
      svg.append(axis);
      c.keys.forEach((_, k) => {
        const below = c.values.map((v) => v.slice(0, k).reduce((p, q) => p + q, 0)), above = c.values.map((v, i) => below[i] + v[k]);
        let d = "";
        c.time.forEach((x, i) => { d += i ? `H${X(x).toFixed(1)}V${Y(above[i]).toFixed(1)}` : `M${X(x).toFixed(1)} ${Y(above[i]).toFixed(1)}`; });
        for (let i = c.time.length - 1; i >= 0; i--) d += i === c.time.length - 1 ? `V${Y(below[i]).toFixed(1)}` : `V${Y(below[i]).toFixed(1)}H${X(c.time[i]).toFixed(1)}`;
        svg.append(sv("path", { d: `${d}z`, fill: CATEGORY[k % CATEGORY.length], opacity: 0.85 }));
      });
      box.replaceChildren(svg);
      box.onpointermove = (e) => {
        const i = nearest(c.time, x0 + ((e.clientX - box.getBoundingClientRect().left - left) / w) * (x1 - x0));
        showTip(e.clientX, e.clientY, el("div", { class: "sub" }, seconds(c.time[i] / 1e6)), c.keys.map((k, n) => el("div", { class: "row" }, el("span", {}, swatch(CATEGORY[n % CATEGORY.length]), " ", k), el("b", {}, bytes(c.values[i][n])))));
      };
      box.onpointerleave = hideTip;
    }
    charts.push({ draw, of: "run" });
    draw();
  }

  // ---- tables -------------------------------------------------------------------------------------------------------------
  function sortable(columns, rows, id) {
    let by = null, up = false;
    const body = el("tbody");
    const fill = () => {
      const sorted = by === null ? rows : [...rows].sort((p, q) => (p[by] === q[by] ? 0 : (p[by] ?? -Infinity) < (q[by] ?? -Infinity) ? -1 : 1) * (up ? 1 : -1));
      body.replaceChildren(...sorted.map((r) => el("tr", {}, columns.map((c) => el("td", { class: c.text ? "" : "n" }, c.show(r[c.key], r))))));
    };
    const head = el("tr", {}, columns.map((c) => el("th", { class: `sort${c.text ? "" : " n"}`, tabindex: 0, title: c.help || "sort", onclick: () => { up = by === c.key ? !up : !!c.text; by = c.key; fill(); },
      onkeydown: (e) => { if (e.key === "Enter") e.target.click(); } }, c.name)));
    fill();
    return el("div", { class: "scroll" }, el("table", { id }, el("thead", {}, head), body));
  }
  const ms = (v) => (some(v) ? seconds(v / 1e3) : "–");
  function communication(host) {
    const c = run().communication;
    if (!c || !c.rows.length) { host.append(empty("No table was recorded. ", el("code", {}, '{"comms_logger": {"enabled": true}}'), " in the configuration records one.")); return; }
    const columns = [
      { key: "op", name: "operation", text: true, show: (v) => v }, { key: "bytes", name: "message", show: bytes }, { key: "count", name: "calls", show: (v) => short(v, 6), help: "per rank" },
      { key: "total_ms", name: "in all", show: (v) => [ms(v), el("span", { class: "delta" }, percent(c.total_ms ? v / c.total_ms : 0))], help: "per rank, waiting for the others included" },
      { key: "avg_ms", name: "mean", show: ms, help: "without the lowest and highest tenth" }, { key: "slowest_ms", name: "slowest rank", show: ms },
      { key: "bus_gbps", name: "bus", show: (v) => (v ? `${short(v, 3)} Gbit/s` : "–"), help: "bandwidth as in nccl-tests" }, { key: "algorithm_gbps", name: "algorithm", show: (v) => (v ? `${short(v, 3)} Gbit/s` : "–") },
    ];
    if (c.rows.some((r) => some(r.waiting_ms))) columns.splice(4, 0, { key: "waiting_ms", name: "of it waiting", show: ms, help: "for the slowest rank to arrive" });
    host.append(el("div", { class: "card" }, sortable(columns, c.rows, "comms"), el("p", { class: "sub" }, `Means over ${c.ranks.length} rank${c.ranks.length > 1 ? "s" : ""}. Calls that run beside the computation are counted in full.`)));
  }
  function events(host) {
    const found = run().events;
    if (!found.length) { host.append(empty("Nothing happened: no step was skipped, no warning was given.")); return; }
    host.append(el("div", { class: "card" }, sortable([{ key: "step", name: "step", show: (v) => short(v, 9) }, { key: "at", name: "after", show: seconds },
      { key: "kind", name: "what", text: true, show: (v) => el("span", { class: `pill ${v}` }, v) }, { key: "text", name: "", text: true, show: (v) => v }], found, "happened")));
  }
  function configuration(host) {
    const r = run();
    host.append(el("div", { class: "card" }, el("details", { open: Object.keys(r.config).length > 0 && JSON.stringify(r.config).length < 1500 }, el("summary", {}, "Configuration as it was given"), el("pre", { id: "config" }, JSON.stringify(r.config, null, 2))),
      el("p", { class: "sub" }, el("code", {}, "deepc config check ds_config.json"), " explains its keys.")));
    const rest = Object.fromEntries(Object.entries(r.info).filter(([k]) => k !== "predicted" && k !== "plan"));
    if (Object.keys(rest).length) host.append(el("div", { class: "card" }, el("details", {}, el("summary", {}, "The run: versions, machine, batch"), el("pre", {}, JSON.stringify(rest, null, 2)))));
    if (r.info.plan && r.info.plan.text) host.append(el("div", { class: "card" }, el("details", {}, el("summary", {}, "The plan: where each byte of the model states lies"), el("pre", {}, r.info.plan.text))));
    if (r.flops) host.append(el("div", { class: "card" }, el("details", {}, el("summary", {}, "Flops profile"), el("pre", {}, r.flops))));
  }

  // ---- the page -----------------------------------------------------------------------------------------------------------
  function drawRun() {
    for (let i = charts.length - 1; i >= 0; i--) if (charts[i].of === "run") charts.splice(i, 1);
    for (const [id, fill] of [["time", time], ["timeline", timeline], ["memory", memory], ["communication", communication], ["events", events], ["configuration", configuration]]) {
      sections[id].replaceChildren();
      fill(sections[id]);
    }
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
    const chooser = el("div", { class: "bar", style: "margin-top:30px" }, "Details of ", el("span", { class: "group", id: "chooser" }, RUNS.map((r, i) => el("button", { type: "button", "aria-pressed": String(i === 0), onclick: (e) => {
      state.run = i;
      for (const b of e.currentTarget.parentNode.children) b.setAttribute("aria-pressed", String(b === e.currentTarget));
      about(); drawRun();
    } }, swatch(color(i)), " ", r.name))));
    const facts = el("div");
    const about = () => facts.replaceChildren(tiles(run().summary), findings(run()) || "");
    page.append(chooser, facts);
    about();
  }
  for (const [id, name] of [["time", "Time of a step"], ["timeline", "Timeline"], ["memory", "Memory"], ["communication", "Communication"], ["events", "Events"], ["configuration", "Configuration"]]) page.append(...section(id, name));
  drawRun();
  page.append(el("footer", {}, `Made by deepc ${DATA.version} on ${DATA.made}. This file is whole: it loads nothing. `, RUNS.map((r) => r.path).join(", ")));
  let width = page.clientWidth, wait = 0;
  new ResizeObserver(() => {
    if (page.clientWidth === width) return;
    width = page.clientWidth;
    clearTimeout(wait);
    wait = setTimeout(redraw, 60);
  }).observe(page);
  document.documentElement.dataset.ready = "yes";
})();
