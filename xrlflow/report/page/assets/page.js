"use strict";
// Texts of a model only ever become text nodes: nothing here parses HTML.
(() => {
const DATA = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const HUES = [212, 28, 140, 282, 350, 178, 50, 320, 95, 250];
const $ = (id) => document.getElementById(id);

function put(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key.startsWith("--")) node.style.setProperty(key, value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) node.append(child);
  }
  return node;
}
const el = (tag, attributes, ...children) => put(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => put(document.createElementNS(SVG, tag), attributes, children);
const say = (text) => { $("live").textContent = text; };
const hue = (region) => HUES[region % HUES.length];

// --- numbers ---

const times = (x, digits = 3) => `${x.toFixed(digits)}×`;
const interval = (m) => m.low === null ? "too few measurements for an interval" : `${m.low.toFixed(3)} to ${m.high.toFixed(3)}`;
const plural = (n, one, many) => `${n.toLocaleString("en")} ${n === 1 ? one : many || one + "s"}`;
function seconds(s, beside = s) { // in the unit that fits the larger of both
  const size = Math.max(Math.abs(s), Math.abs(beside));
  if (size === 0) return "0";
  if (size >= 1) return `${s.toFixed(2)} s`;
  return size >= 1e-3 ? `${(s * 1e3).toFixed(3)} ms` : `${(s * 1e6).toFixed(2)} µs`;
}
const micro = (s) => s === null ? "" : (s * 1e6).toFixed(2);
const count = (list, key) => {
  const found = new Map();
  for (const item of list) found.set(key(item), (found.get(key(item)) || 0) + 1);
  return [...found].sort((a, b) => b[1] - a[1]);
};
const opsOf = (drawing, indices) => count(indices.map((i) => drawing.boxes[i][0]), (op) => op)
  .map(([op, n]) => n === 1 ? op : `${n} ${op}`).join(", ") || "nothing";
const spread = (ranges) => ranges.flatMap(([a, b]) => Array.from({length: b - a + 1}, (_, i) => a + i));

// --- tables that can be sorted ---

// columns: {name, num, key(row), cell(row)}.
function table(caption, columns, rows, options = {}) {
  const body = el("tbody");
  const shown = rows.map((row) => {
    const cells = columns.map((c, i) => {
      const content = c.cell ? c.cell(row) : String(c.key(row) ?? "");
      return el(i === 0 ? "th" : "td", {scope: i === 0 ? "row" : null, class: [c.num ? "num" : "", c.class || ""].join(" ").trim() || null}, content);
    });
    const line = el("tr", {"aria-selected": options.selectable ? "false" : null}, cells);
    return {row, line};
  });
  body.append(...shown.map((s) => s.line));
  const heads = columns.map((c) => {
    const head = el("th", {scope: "col", class: [c.num ? "num" : "", c.class || ""].join(" ").trim() || null});
    if (!c.key) { head.append(c.name); return head; }
    head.setAttribute("aria-sort", "none");
    head.append(el("button", {type: "button", onclick: () => {
      const down = head.getAttribute("aria-sort") === (c.num ? "none" : "ascending") || (c.num && head.getAttribute("aria-sort") === "ascending");
      heads.forEach((h) => h.hasAttribute("aria-sort") && h.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const sign = down ? -1 : 1;
      const sorted = [...shown].sort((a, b) => {
        const x = c.key(a.row), y = c.key(b.row);
        if (x === null || x === undefined) return 1;
        if (y === null || y === undefined) return -1;
        return sign * (typeof x === "number" ? x - y : String(x).localeCompare(String(y)));
      });
      body.append(...sorted.map((s) => s.line));
      say(`${caption}: sorted by ${c.name}, ${down ? "descending" : "ascending"}`);
    }}, c.name));
    return head;
  });
  const node = el("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": caption},
    el("table", {class: options.names ? "names" : null}, el("caption", {class: options.caption ? null : "unseen"}, caption), el("thead", {}, el("tr", {}, heads)), body));
  node.lines = shown;
  return node;
}

// --- charts: drawn anew for each width, so that their text keeps its size ---

const charts = new Map();
const resized = new ResizeObserver((entries) => { for (const e of entries) drawChart(e.target); });
function drawChart(box) {
  const known = charts.get(box), width = Math.floor(box.clientWidth - 26);
  if (!known || width < 50 || known.width === width) return;
  known.width = width;
  box.replaceChildren(known.draw(width));
}
function chart(draw) {
  const box = el("div", {class: "chart"});
  charts.set(box, {draw, width: 0});
  resized.observe(box);
  return box;
}
function nice(low, high, wanted) {
  const step = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(step));
  const size = [1, 2, 2.5, 5, 10].map((m) => m * power).find((m) => m >= step) || 10 * power;
  const found = [];
  for (let v = Math.ceil(low / size) * size; v <= high + size * 1e-9; v += size) found.push(Math.abs(v) < size * 1e-9 ? 0 : v);
  return found;
}
function ratioScale(values, left, right) {
  let low = Math.min(1, ...values), high = Math.max(1, ...values);
  const pad = Math.max((Math.log(high) - Math.log(low)) * .06, .01);
  low = Math.log(low) - pad; high = Math.log(high) + pad;
  const at = (v) => left + (Math.log(v) - low) / (high - low) * (right - left);
  let ticks = nice(Math.exp(low), Math.exp(high), Math.max(2, Math.floor((right - left) / 110)));
  if (Math.exp(high) / Math.exp(low) > 6) ticks = [.01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 20, 50, 100].filter((v) => Math.log(v) > low && Math.log(v) < high);
  return {at, ticks: ticks.filter((v) => v > 0)};
}
function ratioAxis(scale, top, bottom) {
  return svg("g", {}, scale.ticks.map((v) => [
    svg("line", {class: "grid", x1: scale.at(v), x2: scale.at(v), y1: top, y2: bottom}),
    svg("text", {x: scale.at(v), y: bottom + 15, "text-anchor": "middle"}, `${+v.toFixed(3)}×`),
  ]), svg("line", {class: "one", x1: scale.at(1), x2: scale.at(1), y1: top, y2: bottom}));
}

function intervalChart(measured) {
  const colour = {result: "var(--good)", decision: "var(--accent)", control: "var(--control)", trial: "var(--accent)"};
  return chart((width) => {
    const narrow = width < 620, left = narrow ? 8 : Math.min(330, width * .4), right = width - 8;
    const ends = measured.flatMap((m) => [m.median, m.low, m.high].filter((v) => v !== null && v > 0));
    const scale = ratioScale(ends, left + 6, right - 6), step = narrow ? 40 : 26, height = measured.length * step + 8;
    return svg("svg", {viewBox: `0 0 ${width} ${height + 22}`, height: height + 22, role: "img", "aria-label": `Measured comparisons, as intervals. ${measured.slice(0, 3).map((m) => `${m.name}: ${times(m.median)}, ${interval(m)}`).join(". ")}`},
      ratioAxis(scale, 4, height),
      measured.map((m, i) => {
        const y = i * step + (narrow ? 28 : 17), fade = m.kept === false ? .45 : 1;
        const most = narrow ? Math.floor(width / 6.4) : Math.floor(left / 6.2);
        const label = m.name.length > most ? `${m.name.slice(0, most - 2)}…` : m.name;
        return svg("g", {opacity: fade},
          svg("title", {}, `${m.name}: ${times(m.median)}, ${interval(m)}${m.kept === true ? ", kept" : m.kept === false ? ", not kept" : ""}`),
          svg("text", {class: m.group === "result" ? "strong" : null, x: narrow ? 2 : left - 8, y: narrow ? y - 11 : y + 4, "text-anchor": narrow ? "start" : "end"}, label),
          m.low === null ? null : svg("line", {x1: scale.at(m.low), x2: scale.at(m.high), y1: y, y2: y, stroke: colour[m.group], "stroke-width": m.group === "result" ? 5 : 3, "stroke-linecap": "round", "stroke-opacity": .45}),
          svg("circle", {cx: scale.at(m.median), cy: y, r: m.group === "result" ? 5 : 3.6, fill: colour[m.group]}));
      }));
  });
}

function ratioChart(ratios, controls) {
  const rows = [["result", ratios, "var(--good)"], ["A/A", controls, "var(--control)"]].filter((r) => r[1].length);
  return chart((width) => {
    const left = 52, scale = ratioScale([...ratios, ...controls], left, width - 10), each = 78, height = rows.length * each;
    return svg("svg", {viewBox: `0 0 ${width} ${height + 22}`, height: height + 22, role: "img", "aria-label": `Ratio in each of ${ratios.length} processes. Result: from ${Math.min(...ratios).toFixed(3)} to ${Math.max(...ratios).toFixed(3)}.${controls.length ? ` Original against itself: from ${Math.min(...controls).toFixed(3)} to ${Math.max(...controls).toFixed(3)}.` : ""}`},
      ratioAxis(scale, 2, height),
      rows.map(([name, values, colour], row) => {
        const base = (row + 1) * each - 12, stacks = new Map();
        return svg("g", {}, svg("text", {class: "strong", x: 2, y: base - 18}, name),
          [...values].sort((a, b) => a - b).map((v) => {
            const slot = Math.round(scale.at(v) / 7), n = stacks.get(slot) || 0;
            stacks.set(slot, n + 1);
            return svg("circle", {cx: slot * 7, cy: Math.max(base - n * 7.4, base - 60), r: 3.2, fill: colour, "fill-opacity": .8}, svg("title", {}, times(v)));
          }));
      }));
  });
}

function curveChart(points, label, names, marks) {
  const xs = points.map((p) => p[0]), ys = points.map((p) => p[1]);
  return chart((width) => {
    const left = 66, right = width - 12, height = 210;
    const xmax = Math.max(1, ...xs), high = Math.max(...ys), low = Math.min(...ys), pad = (high - low || high || 1) * .08;
    const x = (v) => left + v / xmax * (right - left), y = (v) => 8 + (high + pad - v) / (high - low + 2 * pad) * (height - 12);
    const path = points.map(([a, b], i) => i === 0 ? `M${x(a)},${y(b)}` : marks ? `L${x(a)},${y(b)}` : `H${x(a)}V${y(b)}`).join("");
    return svg("svg", {viewBox: `0 0 ${width} ${height + 36}`, height: height + 36, role: "img", "aria-label": `${label}: from ${seconds(ys[0])} to ${seconds(ys[ys.length - 1])} in ${plural(xmax, "step")}`},
      nice(low - pad, high + pad, 4).filter((v) => v >= 0).map((v) => [svg("line", {class: "grid", x1: left, x2: right, y1: y(v), y2: y(v)}), svg("text", {x: left - 8, y: y(v) + 4, "text-anchor": "end"}, seconds(v))]),
      nice(0, xmax, Math.min(8, Math.floor(width / 80))).filter((v) => Number.isInteger(v)).map((v) => svg("text", {x: x(v), y: height + 14, "text-anchor": "middle"}, String(v))),
      svg("text", {x: right, y: height + 32, "text-anchor": "end"}, label),
      svg("path", {d: path, fill: "none", stroke: "var(--accent)", "stroke-width": 2, "stroke-linejoin": "round"}),
      !marks || points.length > 400 ? null : points.map(([a, b], i) => {
        const up = i > 0 && b > ys[i - 1] * (1 + 1e-9);
        return svg("circle", {cx: x(a), cy: y(b), r: up ? 4 : 2.6, fill: up ? "var(--warn)" : "var(--accent)"}, svg("title", {}, i === 0 ? `start: ${seconds(b)}` : `${i}. ${names[i - 1]}: ${seconds(b)}${up ? " (dearer than before)" : ""}`));
      }));
  });
}

// --- graphs ---

// A graph as a tree of parts. Each level is laid out by itself; equal levels are laid out once.
class View {
  constructor(drawing, host, name, changed, onpick) {
    Object.assign(this, {drawing, name, changed, onpick, open: new Set(), layouts: new Map(), shapes: new Map(), hits: new Set(), chosen: new Set(), at: null});
    this.scale = 1; this.x = 0; this.y = 0;
    this.grow();
    const button = (text, label, act) => el("button", {type: "button", "aria-label": `${label} (${name})`, title: label, onclick: act}, text);
    this.canvas = el("div", {class: "canvas", tabindex: "0", role: "application", "aria-roledescription": "graph",
      "aria-label": `${name}: ${plural(this.nodes, "operator")}. Arrows move, plus and minus zoom, 0 shows all, N and P go from box to box, Enter folds and unfolds, U unfolds all, F folds all.`});
    this.svg = svg("svg", {"aria-hidden": "true"});
    this.world = svg("g");
    this.svg.append(svg("defs", {}, svg("marker", {id: `arrow-${name}`, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 6, markerHeight: 6, orient: "auto"}, svg("path", {d: "M0,1 L7,4 L0,7", fill: "none", stroke: "var(--soft)"}))), this.world);
    this.canvas.append(this.svg);
    host.append(el("div", {class: "pane", role: "group", "data-side": name, "aria-label": name},
      el("header", {}, el("h3", {}, name, " ", el("span", {}, plural(this.nodes, "operator"))),
        el("div", {}, button("−", "Zoom out", () => this.zoom(1 / 1.3)), button("+", "Zoom in", () => this.zoom(1.3)), button("⤢", "Show all", () => this.fit()), button("⊞", "Unfold all", () => this.unfold(true)), button("⊟", "Fold all", () => this.unfold(false)))),
      this.canvas));
    this.listen();
  }

  grow() {
    const {boxes, parts, edges} = this.drawing;
    this.nodes = boxes.filter((b) => b[0] !== "Input" && b[0] !== "Output").length;
    this.parts = parts.map(([start, end, parent, times, title], id) => ({id, start, end, parent, times, title, children: [], edges: []}));
    this.root = {id: -1, start: 0, end: boxes.length, parent: null, times: 0, title: "", children: [], edges: []};
    const owner = new Int32Array(boxes.length).fill(-1);
    for (const part of this.parts) for (let i = part.start; i < part.end; i++) owner[i] = part.id; // inner parts come later
    this.owner = owner;
    const get = (id) => id < 0 ? this.root : this.parts[id];
    this.get = get;
    for (let i = 0; i < boxes.length; i++) get(owner[i]).children.push(i);
    for (const part of this.parts) get(part.parent).children.push(part);
    const first = (c) => typeof c === "number" ? c : c.start;
    for (const part of [this.root, ...this.parts]) part.children.sort((a, b) => first(a) - first(b));
    const chain = (i) => { const found = [i]; for (let p = owner[i]; p >= 0; p = this.parts[p].parent) found.push(this.parts[p]); found.push(this.root); return found.reverse(); };
    for (const [a, b] of edges) {
      const x = chain(a), y = chain(b);
      let d = 0;
      while (x[d + 1] === y[d + 1]) d++;
      x[d].edges.push([x[d + 1], y[d + 1]]);
    }
    for (const part of [this.root, ...this.parts]) {
      const place = new Map(part.children.map((c, i) => [c, i])), seen = new Set();
      part.edges = part.edges.map(([a, b]) => [place.get(a), place.get(b)]).filter(([a, b]) => { const k = a * 65536 + b; return !seen.has(k) && seen.add(k); });
    }
  }

  size(child) {
    if (typeof child === "number") {
      const op = this.label(child);
      return {width: Math.max(44, 18 + op.length * 6.7), height: 26, key: `n${op.length}`};
    }
    if (this.open.has(child.id)) {
      const inner = this.layout(child);
      return {width: Math.max(inner.width + 20, 34 + this.heading(child).length * 6.6), height: inner.height + 42, key: `o${inner.key}`};
    }
    const [a, b] = this.caption(child);
    return {width: Math.max(70, 26 + Math.max(a.length * 6.7, b.length * 5.9)), height: 44, key: `f${a.length}.${b.length}`};
  }
  label(i) { const op = this.drawing.boxes[i][0].replace(/^.*::/, ""), n = this.drawing.boxes[i][1]; const t = (op === "Input" || op === "Output") && n ? n : op; return t.length > 26 ? `${t.slice(0, 25)}…` : t; }
  caption(part) {
    const title = part.title.length > 30 ? `${part.title.slice(0, 29)}…` : part.title;
    const inside = this.operators(part);
    return [title || "part", part.times > 1 ? `${part.times} × ${plural(Math.round(inside / part.times), "operator")}` : plural(inside, "operator")];
  }
  operators(part) { let n = 0; for (let i = part.start; i < part.end; i++) { const op = this.drawing.boxes[i][0]; n += op !== "Input" && op !== "Output"; } return n; }
  heading(part) { const [a, b] = this.caption(part); return `${a} · ${b}`; }

  layout(part) {
    const sizes = part.children.map((c) => this.size(c));
    const name = `${part.id}`;
    const shape = JSON.stringify([sizes.map((s) => s.key), part.edges]);
    let known = this.shapes.get(shape);
    if (!known) {
      const graph = new dagre.graphlib.Graph();
      graph.setGraph({rankdir: "TB", nodesep: 16, ranksep: 26, edgesep: 8, marginx: 4, marginy: 4, ranker: part.children.length > 30 ? "longest-path" : "network-simplex"});
      graph.setDefaultEdgeLabel(() => ({}));
      sizes.forEach((s, i) => graph.setNode(String(i), {width: s.width, height: s.height}));
      part.edges.forEach(([a, b]) => graph.setEdge(String(a), String(b)));
      dagre.layout(graph);
      const g = graph.graph();
      known = {key: String(this.shapes.size), width: g.width || 60, height: g.height || 30,
        at: sizes.map((_, i) => { const n = graph.node(String(i)); return [n.x - n.width / 2, n.y - n.height / 2, n.width, n.height]; }),
        lines: part.edges.map(([a, b]) => graph.edge(String(a), String(b)).points)};
      this.shapes.set(shape, known);
    }
    this.layouts.set(name, known);
    return known;
  }

  draw() {
    this.bounds = new Map();
    this.order = [];
    const top = this.layout(this.root);
    this.width = top.width; this.height = top.height;
    this.world.replaceChildren(this.level(this.root, 0, 0));
    this.place();
  }

  level(part, dx, dy) {
    const known = this.layouts.get(`${part.id}`), group = svg("g", {transform: `translate(${part === this.root ? 0 : 10},${part === this.root ? 0 : 34})`});
    const lines = svg("g");
    for (const points of known.lines) {
      let d = `M${points[0].x},${points[0].y}`;
      for (let i = 1; i < points.length - 1; i++) {
        const mid = i === points.length - 2 ? points[i + 1] : {x: (points[i].x + points[i + 1].x) / 2, y: (points[i].y + points[i + 1].y) / 2};
        d += `Q${points[i].x},${points[i].y} ${mid.x},${mid.y}`;
      }
      if (points.length === 2) d += `L${points[1].x},${points[1].y}`;
      lines.append(svg("path", {class: "edge", d, "marker-end": `url(#arrow-${this.name})`}));
    }
    group.append(lines);
    part.children.forEach((child, i) => {
      const [x, y, w, h] = known.at[i];
      group.append(this.one(child, x, y, w, h, dx + x, dy + y));
    });
    return group;
  }

  one(child, x, y, w, h, ax, ay) {
    const part = typeof child === "number" ? null : child;
    const id = part ? `p${part.id}` : `n${child}`;
    this.bounds.set(id, [ax, ay, w, h]);
    this.order.push(id);
    const inside = part ? this.regions(part) : null;
    const text = (label, tx, ty, kind) => svg("text", {x: tx, y: ty, "text-anchor": "middle", class: kind || null}, label);
    if (!part) {
      const io = this.drawing.boxes[child][0] === "Input" || this.drawing.boxes[child][0] === "Output", region = this.changed.get(child);
      const box = this.drawing.boxes[child];
      return svg("g", {class: `node${io ? " io" : ""}${region !== undefined ? " changed" : ""}${this.hits.has(child) ? " hit" : ""}${this.chosen.has(child) ? " chosen" : ""}`, "data-id": id, "--h": region !== undefined ? hue(region) : null, transform: `translate(${x},${y})`},
        svg("title", {}, [box[0], box[1], box[2]].filter(Boolean).join(" · ")), svg("rect", {width: w, height: h, rx: io ? 13 : 5}), text(this.label(child), w / 2, 17));
    }
    const hit = [...this.hits].some((i) => i >= part.start && i < part.end);
    const chosen = this.chosen.size > 0 && [...this.chosen].some((i) => i >= part.start && i < part.end);
    if (this.open.has(part.id)) {
      return svg("g", {class: "open", "data-open": id, transform: `translate(${x},${y})`}, svg("rect", {class: "frame", width: w, height: h, rx: 8}),
        svg("g", {class: "head", "data-id": id}, svg("title", {}, `Fold ${part.title}`), svg("rect", {x: 1, y: 1, width: w - 2, height: 25, rx: 7}), svg("text", {x: 10, y: 17}, `− ${this.heading(part)}`)),
        this.level(part, ax + 10, ay + 34));
    }
    const [a, b] = this.caption(part);
    const stack = part.times > 1 ? [svg("rect", {x: 6, y: -6, width: w, height: h, rx: 7}), svg("rect", {x: 3, y: -3, width: w, height: h, rx: 7})] : [];
    return svg("g", {class: `fold${hit ? " hit" : ""}${chosen ? " chosen" : ""}`, "data-id": id, transform: `translate(${x},${y})`},
      svg("title", {}, `Unfold ${part.title}`), stack, svg("rect", {width: w, height: h, rx: 7}), text(a, w / 2, 19), text(b, w / 2, 34, "small"),
      inside.slice(0, 6).map((r, i) => svg("circle", {class: "dot", cx: 9 + i * 9, cy: h, r: 3.6, "--h": hue(r)})));
  }

  regions(part) {
    const found = new Set();
    for (let i = part.start; i < part.end; i++) if (this.changed.has(i)) found.add(this.changed.get(i));
    return [...found];
  }

  place() { this.world.setAttribute("transform", `translate(${this.x},${this.y}) scale(${this.scale})`); }
  fit(box) {
    const w = this.canvas.clientWidth, h = this.canvas.clientHeight, [bx, by, bw, bh] = box || [0, 0, this.width, this.height];
    const room = box ? 60 : 14;
    this.scale = Math.max(.03, Math.min((w - room) / bw, (h - room) / bh, box ? 1.15 : 1.25));
    if (!box && this.scale < .45) { // too small to read: the width, from the top
      this.scale = Math.min(Math.max(Math.min((w - room) / bw, 1), .3), 1.25);
      this.x = (w - bw * this.scale) / 2; this.y = 10;
    } else { this.x = w / 2 - (bx + bw / 2) * this.scale; this.y = h / 2 - (by + bh / 2) * this.scale; }
    this.place();
  }
  zoom(by, cx = this.canvas.clientWidth / 2, cy = this.canvas.clientHeight / 2) {
    const scale = Math.max(.03, Math.min(4, this.scale * by)), k = scale / this.scale;
    this.x = cx - (cx - this.x) * k; this.y = cy - (cy - this.y) * k; this.scale = scale;
    this.place();
  }
  unfold(all) {
    this.open = new Set(all ? this.parts.map((p) => p.id) : []);
    this.draw(); this.fit();
    say(all ? `${this.name}: all unfolded` : `${this.name}: all folded`);
  }
  toggle(part) {
    const [x, y] = this.bounds.get(`p${part.id}`), sx = this.x + x * this.scale, sy = this.y + y * this.scale;
    if (this.open.has(part.id)) this.open.delete(part.id); else this.open.add(part.id);
    this.draw();
    const [nx, ny] = this.bounds.get(`p${part.id}`);
    this.x = sx - nx * this.scale; this.y = sy - ny * this.scale; // it stays where it was
    this.place();
    say(`${part.title} ${this.open.has(part.id) ? "unfolded" : "folded"}`);
  }
  // Unfold what has a few of these boxes, and show them. What is in many layers is easier to see on their stack.
  reveal(indices, exact) {
    const wanted = new Set(indices), within = (part) => { let n = 0; for (let i = part.start; i < part.end; i++) n += wanted.has(i); return n; };
    for (const part of this.parts) { // outer ones come first
      const n = within(part), whole = n === part.end - part.start;
      const many = part.times > 1 && part.children.filter((c) => within(c) > 0).length > 3;
      const shut = part.parent >= 0 && !this.open.has(part.parent);
      if (n > 0 && (exact || !(whole || many || shut || n > 40))) this.open.add(part.id);
    }
    this.draw();
    let box = null;
    for (const index of indices) {
      const [x, y, w, h] = this.bounds.get(this.visible(index));
      box = box ? [Math.min(box[0], x), Math.min(box[1], y), Math.max(box[2], x + w), Math.max(box[3], y + h)] : [x, y, x + w, y + h];
    }
    if (!box) return;
    this.fit([box[0], box[1], box[2] - box[0], box[3] - box[1]]);
    if (this.scale < .3) this.fit(this.bounds.get(this.visible(indices[0]))); // too far apart: the first
  }
  visible(index) {
    let id = `n${index}`;
    for (let p = this.owner[index]; p >= 0; p = this.parts[p].parent) if (!this.open.has(p)) id = `p${p}`;
    return id;
  }
  pick(id, keyboard) {
    this.at = id;
    if (id[0] === "p") { this.toggle(this.parts[+id.slice(1)]); return; }
    this.onpick(this, +id.slice(1), keyboard);
  }
  step(by) {
    const now = this.order.indexOf(this.at), next = this.order[(now + by + this.order.length) % this.order.length] || this.order[0];
    this.at = next;
    const [x, y, w, h] = this.bounds.get(next);
    this.x = this.canvas.clientWidth / 2 - (x + w / 2) * this.scale; this.y = this.canvas.clientHeight / 2 - (y + h / 2) * this.scale;
    this.place();
    this.svg.querySelectorAll(".hit").forEach((n) => n.classList.remove("hit"));
    this.svg.querySelector(`[data-id="${next}"], [data-open="${next}"]`)?.classList.add("hit");
    const part = next[0] === "p" ? this.parts[+next.slice(1)] : null;
    say(part ? `${this.heading(part)}, ${this.open.has(part.id) ? "unfolded" : "folded"}` : this.drawing.boxes[+next.slice(1)].slice(0, 3).filter(Boolean).join(", "));
  }

  listen() {
    const c = this.canvas, pointers = new Map();
    let moved = 0, gap = 0;
    c.addEventListener("wheel", (e) => {
      if (!(e.ctrlKey || e.metaKey || document.activeElement === c)) return; // else the page scrolls
      e.preventDefault();
      const r = c.getBoundingClientRect();
      this.zoom(Math.exp(-Math.max(-80, Math.min(80, e.deltaY)) * .004), e.clientX - r.left, e.clientY - r.top);
    }, {passive: false});
    c.addEventListener("focus", () => c.classList.add("active"));
    c.addEventListener("blur", () => c.classList.remove("active"));
    c.addEventListener("pointerdown", (e) => { pointers.set(e.pointerId, [e.clientX, e.clientY]); moved = 0; gap = 0; c.focus({preventScroll: true}); });
    c.addEventListener("pointermove", (e) => {
      const last = pointers.get(e.pointerId);
      if (!last) return;
      const dx = e.clientX - last[0], dy = e.clientY - last[1];
      pointers.set(e.pointerId, [e.clientX, e.clientY]);
      moved += Math.abs(dx) + Math.abs(dy);
      if (moved > 4 && !c.hasPointerCapture(e.pointerId)) c.setPointerCapture(e.pointerId);
      if (pointers.size === 2) {
        const [[ax, ay], [bx, by]] = [...pointers.values()], now = Math.hypot(ax - bx, ay - by), r = c.getBoundingClientRect();
        if (gap) this.zoom(now / gap, (ax + bx) / 2 - r.left, (ay + by) / 2 - r.top);
        gap = now;
      } else { this.x += dx; this.y += dy; this.place(); }
    });
    const up = (e) => { pointers.delete(e.pointerId); gap = 0; };
    c.addEventListener("pointerup", up); c.addEventListener("pointercancel", up);
    c.addEventListener("click", (e) => {
      const found = e.target.closest("[data-id]");
      if (found && moved <= 4) this.pick(found.dataset.id, false);
    });
    const keys = {"+": () => this.zoom(1.3), "=": () => this.zoom(1.3), "-": () => this.zoom(1 / 1.3), "0": () => this.fit(),
      ArrowLeft: () => { this.x += 60; this.place(); }, ArrowRight: () => { this.x -= 60; this.place(); }, ArrowUp: () => { this.y += 60; this.place(); }, ArrowDown: () => { this.y -= 60; this.place(); },
      n: () => this.step(1), p: () => this.step(-1), u: () => this.unfold(true), f: () => this.unfold(false), Enter: () => this.at && this.bounds.has(this.at) && this.pick(this.at, true)};
    c.addEventListener("keydown", (e) => {
      if (e.ctrlKey || e.metaKey || e.altKey || !keys[e.key]) return;
      e.preventDefault();
      keys[e.key]();
    });
  }
}

// --- sections ---

function section(id, title, lead, ...content) {
  return el("section", {id, "aria-labelledby": `${id}-title`, "data-nav": title}, el("h2", {id: `${id}-title`}, title), lead ? el("p", {class: "lead"}, lead) : null, content);
}

const fact = (name, value, small, tone) => el("div", {}, el("dt", {}, name), el("dd", {class: tone || null}, value, small ? el("small", {}, small) : null));

function hero(run) {
  const r = run.report;
  if (!r) {
    const pair = run.after !== null;
    return el("section", {class: "hero", id: "summary"}, el("h1", {}, pair ? "Two models, side by side" : "One model"),
      el("p", {class: "lead"}, "Nothing was optimised: this page shows the files as they are, with constants folded."),
      el("dl", {class: "facts"}, fact(pair ? "operators in A" : "operators", String(operators(DATA.before))), pair ? fact("operators in B", String(operators(run.after))) : null,
        pair ? fact("regions that differ", String(run.substitutions.length)) : null,
        run.operators_before ? fact(pair ? "a run of A, profiled" : "a run, profiled", `${run.operators_before.run_ms.toFixed(3)} ms`, `mean of ${run.operators_before.runs}`) : null,
        run.operators_after ? fact("a run of B, profiled", `${run.operators_after.run_ms.toFixed(3)} ms`, `mean of ${run.operators_after.runs}`) : null));
  }
  const faster = r.speedup, decided = r.decided;
  let title, tone = "good";
  if (r.returned_original) { title = "The original, unchanged"; tone = ""; }
  else if (faster !== null) title = `${faster.toFixed(2)} times as fast`;
  else if (decided !== null) title = "Clearly faster";
  else { title = "Another graph, not measured"; tone = ""; }
  if (faster !== null && r.speedup_high !== null && r.speedup_high < 1) tone = "bad";
  else if (faster !== null && (r.speedup_low === null || r.speedup_low <= 1)) tone = "warn";
  const control = run.measured.find((m) => m.group === "control");
  const fair = control && control.low !== null && control.low <= 1.005 && control.high >= .995;
  const range = faster !== null ? (r.speedup_low !== null ? `95% interval ${r.speedup_low.toFixed(3)} to ${r.speedup_high.toFixed(3)}, in ${plural(r.processes, "fresh process", "fresh processes")}. ` : "Too few measurements for an interval. ") : "";
  return el("section", {class: "hero", id: "summary"}, el("h1", {class: tone}, title), el("p", {class: "lead"}, range, faster !== null && r.reason.startsWith("measured ") ? null : `${r.reason.charAt(0).toUpperCase()}${r.reason.slice(1)}.`),
    el("dl", {class: "facts"},
      r.latency_before_ms !== null ? fact("latency", r.latency_after_ms !== null ? `${r.latency_before_ms.toFixed(3)} → ${r.latency_after_ms.toFixed(3)} ms` : `${r.latency_before_ms.toFixed(3)} ms`, `${plural(r.threads, "thread")}, measured`) : fact("latency", "not measured"),
      control ? fact("original against itself", times(control.median), control.low === null ? interval(control) : `${interval(control)}${fair ? "" : ": noisy"}`, fair ? null : "warn") : null,
      fact("same function", r.verified === true ? "verified" : r.verified === false ? "different" : "not checked", r.max_error !== null ? `largest difference ${r.max_error.toExponential(1)}` : null, r.verified === true ? "good" : r.verified === false ? "bad" : "warn"),
      fact("operators", `${r.nodes_before} → ${r.nodes_after}`, "in the file"),
      fact("substitutions", String(run.substitutions.length), `of ${plural(new Set(run.substitutions.map((s) => s[0])).size, "rule")}`)));
}
const operators = (drawing) => drawing.boxes.filter((b) => b[0] !== "Input" && b[0] !== "Output").length;

function fasterSection(run) {
  if (!run.report) return null;
  const main = run.measured.filter((m) => m.group !== "trial");
  const lead = "Whole models, in turns, each comparison in processes of its own. The line marks 1: as fast as before.";
  if (!main.length) return section("faster", "Is it faster?", "Nothing was measured, so nobody knows: modelled costs are not latencies.");
  const spreadOut = run.ratios.length > 1 ? [el("h3", {}, "How each process saw it"), el("p", {class: "lead"}, `One dot for each process. The original against itself (A/A) shows what noise alone does.`), ratioChart(run.ratios, run.controls)] : null;
  return section("faster", "Is it faster?", lead, intervalChart(main), table("The last comparisons, in numbers", [
    {name: "comparison", key: (m) => m.name}, {name: "times as fast", num: true, key: (m) => m.median, cell: (m) => m.median.toFixed(3)},
    {name: "low", num: true, key: (m) => m.low, cell: (m) => m.low === null ? "–" : m.low.toFixed(3)}, {name: "high", num: true, key: (m) => m.high, cell: (m) => m.high === null ? "–" : m.high.toFixed(3)}], main), spreadOut);
}

function sameSection(run) {
  if (!run.report) return null;
  const v = run.verification;
  const notes = run.report.notes.length ? [el("h3", {}, "Notes"), el("ul", {class: "plain"}, run.report.notes.map((n) => el("li", {}, n)))] : null;
  if (!v) return section("same", "Is it the same function?", run.report.returned_original ? "The file is the original, byte for byte." : "It was not compared with the original. Each rule that was used is proven; the whole is not checked.", notes);
  const said = v.message.charAt(0).toUpperCase() + v.message.slice(1);
  const more = [
    ["sizes", v.bindings.map((b) => Object.entries(b).map(([k, n]) => `${k}=${n}`).join(", ")).filter(Boolean).join("; ") || "those of the file"],
    ["values", ["ordinary ones", ...v.values].join("; ")], ["not run", v.left_out.join("; ")], ["not exercised", v.unexercised.join("; ")], ["remarks", v.notes.join("; ")], ["failures", v.failures.join("; ")]].filter(([, t]) => t);
  return section("same", "Is it the same function?", "Both models ran on the same inputs. The tolerance is four times the original's own error against float64.",
    el("p", {class: v.verified ? "good" : "bad"}, el("strong", {}, `${said}.`)),
    table("Outputs, the worst case of each", [
      {name: "output", key: (o) => o.name}, {name: "type", key: (o) => o.type, class: "wide-only"}, {name: "judged by", key: (o) => o.judged_by},
      {name: "error", num: true, key: (o) => o.error, cell: (o) => o.error === null ? "–" : o.error.toExponential(1)},
      {name: "tolerance", num: true, key: (o) => o.tolerance, cell: (o) => o.tolerance === null ? "–" : o.tolerance.toExponential(1)},
      {name: "verdict", key: (o) => o.equal ? "equal" : "different", cell: (o) => el("span", {class: o.equal ? "good" : "bad"}, o.equal ? "equal" : "different")}], v.outputs),
    el("dl", {class: "env"}, more.map(([k, t]) => [el("dt", {}, k), el("dd", {}, t)])), notes);
}

function changesSection(run) {
  const two = run.after !== null, subs = run.substitutions.map(([rule, gain, before, after, near, region], number) => ({number, rule, gain, before: spread(before), after: spread(after), near: spread(near), region}));
  const named = new Map(run.rules.map((r) => [r.name, r])), optimised = run.report !== null;
  const sides = [new Map(), new Map()];
  for (const s of subs) { for (const i of s.before) if (!sides[0].has(i)) sides[0].set(i, s.region); for (const i of s.after) if (!sides[1].has(i)) sides[1].set(i, s.region); }
  const panes = el("div", {class: two ? "panes" : "panes single"}), detail = el("div", {class: "detail", role: "region", "aria-label": "What is selected", tabindex: "-1"});
  const views = [], lines = new Map();
  const clear = () => { for (const v of views) { v.chosen = new Set(); v.hits = new Set(); } lines.forEach((l) => l.setAttribute("aria-selected", "false")); };
  const title = (s) => s.rule || `region ${s.number + 1}`;
  const link = (s, text) => el("button", {type: "button", class: "link", onclick: () => choose(s)}, text || title(s));

  function choose(s) {
    clear();
    lines.get(s.number)?.setAttribute("aria-selected", "true");
    views.forEach((view, side) => {
      const place = side === 0 ? s.before : s.after.length ? s.after : s.near;
      view.chosen = new Set(place);
      if (place.length) view.reveal(place); else view.draw();
    });
    const rule = named.get(s.rule);
    const part = (label, value) => value ? [el("dt", {}, label), el("dd", {}, value)] : null;
    detail.replaceChildren(el("h3", {}, el("span", {class: "swatch", style: `background:hsl(${hue(s.region)} 55% 60%);border-color:hsl(${hue(s.region)} 45% 45%)`}), optimised ? `${s.number + 1}. ${title(s)}` : title(s)),
      rule ? el("p", {class: "mono"}, rule.equation) : null,
      el("dl", {}, part("before", `${plural(s.before.length, "operator")}: ${opsOf(DATA.before, s.before)}`),
        part("after", s.after.length ? `${plural(s.after.length, "operator")}: ${opsOf(run.after, s.after)}` : optimised ? "nothing is left of it" + (s.near.length ? "; what reads the result is marked" : "") : "nothing"),
        part("proof", rule && rule.proof), optimised ? part("gain", s.gain === null ? "made without a price (it tidies the graph before the search)" : `${seconds(s.gain)} by the cost model${s.gain < 0 ? ": dearer, a valley on the way" : ""}; alone it was not measured`) : null));
    history.replaceState(null, "", `#change-${s.number + 1}`);
    say(`${title(s)} selected: ${s.before.length} operators before, ${s.after.length} after`);
  }
  function node(view, index) {
    const side = views.indexOf(view), box = view.drawing.boxes[index];
    clear();
    view.chosen = new Set([index]);
    const touching = subs.filter((s) => (side === 0 ? s.before : s.after).includes(index));
    views.forEach((v) => v.draw());
    const beside = (list) => { const shown = list.slice(0, 12).map((i) => el("button", {type: "button", class: "link", onclick: () => { view.chosen = new Set([i]); view.reveal([i], true); node(view, i); }}, box ? (view.drawing.boxes[i][1] || view.drawing.boxes[i][0]) : "")); return shown.flatMap((b, i) => i ? [", ", b] : [b]).concat(list.length > 12 ? [` and ${list.length - 12} more`] : []); };
    const reads = view.drawing.edges.filter((e) => e[1] === index).map((e) => e[0]), readers = view.drawing.edges.filter((e) => e[0] === index).map((e) => e[1]);
    const part = (label, value) => value && value.length ? [el("dt", {}, label), el("dd", {}, value)] : null;
    detail.replaceChildren(el("h3", {}, box[0]), box[1] ? el("p", {class: "soft"}, box[1]) : null,
      el("dl", {}, part("in", view.name), part("result", box[2]), part("attributes", box[3]), part("weights", box[4]), part("reads", beside(reads)), part("read by", beside(readers)),
        part(optimised ? "changed by" : "region", touching.slice(0, 12).flatMap((s, i) => i ? [", ", link(s)] : [link(s)]))));
    say(`${box[0]} ${box[1]}`);
  }

  const names = optimised ? ["before", "after"] : two ? ["A", "B"] : ["model"];
  views.push(new View(DATA.before, panes, names[0], sides[0], node));
  if (two) views.push(new View(run.after, panes, names[1], sides[1], node));
  const intro = () => detail.replaceChildren(el("p", {class: "soft"}, subs.length ? "Choose a substitution in the table, or a box in a graph: what it is appears here." : "Choose a box in the graph: what it is appears here."));
  intro();

  let found = [], at = -1;
  const status = el("span", {class: "hint", id: "found"});
  const look = () => {
    const text = input.value.trim().toLowerCase();
    found = [];
    views.forEach((view, side) => {
      view.hits = new Set();
      if (text) view.drawing.boxes.forEach((b, i) => { if (`${b[0]} ${b[1]} ${b[2]}`.toLowerCase().includes(text)) { view.hits.add(i); found.push([side, i]); } });
      view.draw();
    });
    at = -1;
    status.textContent = !text ? "" : found.length ? `${plural(found.length, "box", "boxes")}; Enter goes from one to the next` : "nothing has this in its operator, name or type";
    say(status.textContent);
  };
  const input = el("input", {type: "search", id: "find", placeholder: "Search operators, names, types", "aria-label": "Search the graphs", "aria-describedby": "found", oninput: look,
    onkeydown: (e) => { if (e.key !== "Enter" || !found.length) return; at = (at + (e.shiftKey ? found.length - 1 : 1)) % found.length; const [side, i] = found[at]; views[side].reveal([i], true); status.textContent = `${at + 1} of ${found.length}: ${views[side].name}`; say(`${at + 1} of ${found.length}: ${views[side].drawing.boxes[i].slice(0, 2).join(" ")}`); }});

  const columns = [
    {name: optimised ? "substitution" : "region", key: (s) => title(s), cell: (s) => [el("span", {class: "swatch", style: `background:hsl(${hue(s.region)} 55% 60%);border-color:hsl(${hue(s.region)} 45% 45%)`}), link(s)]},
    {name: "#", num: true, key: (s) => s.number + 1}, {name: "before", num: true, key: (s) => s.before.length}, {name: "after", num: true, key: (s) => s.after.length},
    ...(optimised ? [{name: "modelled gain, µs", num: true, key: (s) => s.gain, cell: (s) => s.gain === null ? "–" : micro(s.gain)}, {name: "equation", key: (s) => named.get(s.rule)?.equation || "", class: "wide-only"}] : [{name: "operators of A", key: (s) => opsOf(DATA.before, s.before)}, {name: "operators of B", key: (s) => opsOf(run.after, s.after)}])];
  const list = subs.length ? table(optimised ? "Substitutions, in order" : "Regions that differ", columns, subs, {selectable: true, names: true}) : null;
  list?.lines.forEach(({row, line}) => lines.set(row.number, line));
  const repeated = count(subs, (s) => s.rule);
  const rules = optimised && repeated.length ? [el("h3", {}, "Rules that were used"), table("Rules that were used", [
    {name: "rule", key: ([n]) => n}, {name: "times", num: true, key: ([, n]) => n},
    {name: "modelled gain, µs", num: true, key: ([n]) => subs.filter((s) => s.rule === n).reduce((t, s) => t + (s.gain || 0), 0), cell: ([n]) => micro(subs.filter((s) => s.rule === n).reduce((t, s) => t + (s.gain || 0), 0))},
    {name: "equation", key: ([n]) => named.get(n)?.equation || "", class: "wide-only"}, {name: "proof", key: ([n]) => named.get(n)?.proof || "", class: "wide-only"}], repeated, {names: true})] : null;
  const lead = !two ? (optimised ? "Nothing was changed. This is the model, as it was read." : null) : subs.length ? "Coloured boxes were replaced, or are the replacement; one colour belongs together. Stacks are layers that repeat: click to unfold." : "The graphs are the same.";
  const node_ = section("changes", two ? (optimised ? "What changed, and why" : "Where they differ") : "The graph", lead,
    el("div", {class: "tools"}, input, status, el("span", {class: "hint"}, "Drag to move; click in a graph, then the wheel zooms (or Ctrl and wheel).")),
    panes, detail, list ? [el("h3", {}, optimised ? "Substitutions" : "Regions"), list] : null, rules);
  node_.ready = () => {
    views.forEach((v) => { v.draw(); v.fit(); });
    const wanted = /^#change-(\d+)$/.exec(location.hash);
    if (wanted && subs[+wanted[1] - 1]) { choose(subs[+wanted[1] - 1]); node_.scrollIntoView(); }
  };
  node_.views = views;
  return node_;
}

function timeSection(run) {
  const before = run.operators_before, after = run.operators_after;
  if (!before) return section("time", "Where the time goes", run.lines.join(" ") || "Operators were not timed.");
  const pair = after !== null, find = (p, op) => p?.operators.find((o) => o.op === op);
  const ops = [...new Set([...before.operators, ...(after?.operators || [])].map((o) => o.op))];
  const rows = ops.map((op) => ({op, a: find(before, op), b: find(after, op)})).sort((x, y) => Math.max(y.a?.ms || 0, y.b?.ms || 0) - Math.max(x.a?.ms || 0, x.b?.ms || 0));
  const most = Math.max(...rows.map((r) => Math.max(r.a?.ms || 0, r.b?.ms || 0)), 1e-9), bar = (v, c) => el("i", {style: `width:${(v || 0) / most * 100}%;min-width:${v ? 1 : 0}px;background:var(--${c})`});
  const names = run.report ? ["before", "after"] : ["A", "B"];
  const ms = (o) => o ? o.ms.toFixed(3) : "–";
  return section("time", "Where the time goes", `ONNX Runtime's own profile of ${pair ? "both models" : "the model"}, after its fusions: milliseconds of one run, as a mean of ${before.runs}${pair ? ` and ${after.runs}` : ""}. Profiling slows small operators, so the sums are no latencies.`,
    pair ? el("ul", {class: "key"}, el("li", {}, el("i", {style: "background:var(--before)"}), names[0]), el("li", {}, el("i", {style: "background:var(--after)"}), names[1])) : null,
    table("Time by operator", [
      {name: "operator", key: (r) => r.op}, {name: "", class: "barcell", cell: (r) => pair ? [bar(r.a?.ms, "before"), bar(r.b?.ms, "after")] : bar(r.a?.ms, "after")},
      {name: pair ? `${names[0]}, ms` : "ms", num: true, key: (r) => r.a?.ms ?? 0, cell: (r) => ms(r.a)},
      ...(pair ? [{name: `${names[1]}, ms`, num: true, key: (r) => r.b?.ms ?? 0, cell: (r) => ms(r.b)}] : []),
      {name: "calls", num: true, key: (r) => r.a?.calls ?? 0, cell: (r) => pair ? `${+(r.a?.calls ?? 0).toFixed(1)} → ${+(r.b?.calls ?? 0).toFixed(1)}` : String(+(r.a?.calls ?? 0).toFixed(1)), class: "wide-only"}], rows),
    run.lines.map((l) => el("p", {class: "note"}, l)));
}

function searchSection(run) {
  const c = run.curve, r = run.report;
  if (!c || !r) return null;
  const trials = run.measured.filter((m) => m.group === "trial"), content = [];
  if (c.path.length > 1) {
    const valleys = c.path.filter((v, i) => i > 0 && v > c.path[i - 1] * (1 + 1e-9)).length;
    content.push(el("h3", {}, c.kept ? "The way to the result" : "The way to the best graph by the model, which was not kept"), el("p", {class: "lead"}, valleys ? `${plural(valleys, "step")} made the graph dearer for a while (orange): a valley that a greedy search would not have crossed.` : "Each step made the graph cheaper by the model, or no dearer."), curveChart(c.path.map((v, i) => [i, v]), "substitutions", c.rules, true));
  }
  if (c.progress.length > 1) content.push(el("h3", {}, "The best so far"), curveChart([...c.progress, [Math.max(r.expanded, c.progress[c.progress.length - 1][0]), c.progress[c.progress.length - 1][1]]], "graphs looked at", [], false));
  if (trials.length) content.push(el("h3", {}, "Whole models that were measured on the way"), el("p", {class: "lead"}, "The cost model proposes, measurements decide. Faded: measured, and not kept."), intervalChart(trials), table("Measured comparisons", [
    {name: "proposal", key: (m) => m.name}, {name: "times as fast", num: true, key: (m) => m.median, cell: (m) => m.median.toFixed(3)}, {name: "95% interval", num: true, key: (m) => m.low, cell: (m) => m.low === null ? "–" : interval(m)}, {name: "kept", key: (m) => m.kept ? "yes" : "no"}], trials));
  if (!content.length) content.push(el("p", {class: "note"}, "No substitution was found that is cheaper by the model."));
  return section("search", "How it was found", `${r.search}, ${plural(r.expanded, "graph")} looked at, guided by ${r.cost_model}. Modelled cost ${seconds(r.cost_before, r.cost_after)} → ${seconds(r.cost_after, r.cost_before)}: it guides the search, and is no latency.`, content);
}

function nextSection(run) {
  if (!run.report) return null;
  return section("next", "What next?", run.advice.length ? "What follows from the figures above." : null, run.advice.length ? el("ul", {class: "plain"}, run.advice.map((a) => el("li", {}, ...code(a)))) : el("p", {class: "note"}, "Nothing in the figures asks for another run: the machine was quiet, the time was enough, and everything was checked."));
}
const code = (text) => text.split("`").map((t, i) => i % 2 ? el("code", {}, t) : t);

function whereSection(run) {
  const r = run.report, rows = Object.entries(DATA.environment);
  if (r) rows.push(["took", `${r.seconds.toFixed(1)} s: ${Object.entries(r.phases).map(([k, v]) => `${k} ${v.toFixed(1)}`).join(", ")}`]);
  return section("environment", "Where it was measured", null, el("dl", {class: "env"}, rows.map(([k, v]) => [el("dt", {}, k), el("dd", {}, v)])));
}

function strategiesSection(index) {
  const runs = DATA.runs;
  const measured = runs.flatMap((r) => { const m = r.measured.find((x) => x.group === "result") || r.measured.find((x) => x.group === "decision"); return m ? [{...m, name: r.name, group: "result"}] : []; });
  return section("strategies", "Strategies, side by side", "Each searched for the same time. The sections below are about the one that is chosen above.",
    measured.length ? intervalChart(measured) : null, table("Strategies", [
      {name: "strategy", key: (r) => r.name, cell: (r) => el("button", {type: "button", class: "link", onclick: () => show(runs.indexOf(r))}, r.name)},
      {name: "times as fast", num: true, key: (r) => r.report.speedup, cell: (r) => r.report.speedup === null ? (r.report.returned_original ? "original" : "–") : r.report.speedup.toFixed(3)},
      {name: "95% interval", num: true, key: (r) => r.report.speedup_low, cell: (r) => r.report.speedup_low === null ? "–" : `${r.report.speedup_low.toFixed(3)} to ${r.report.speedup_high.toFixed(3)}`},
      {name: "modelled, ms", num: true, key: (r) => r.report.cost_after, cell: (r) => (r.report.cost_after * 1e3).toFixed(3)},
      {name: "substitutions", num: true, key: (r) => r.substitutions.length}, {name: "graphs", num: true, key: (r) => r.report.expanded},
      {name: "verified", key: (r) => r.report.verified === true ? "yes" : r.report.verified === false ? "no" : "–"}, {name: "seconds", num: true, key: (r) => r.report.seconds, cell: (r) => r.report.seconds.toFixed(1)}], runs));
}

// --- a batch: many models ---

// How many times as fast a result is, and the interval: measured after the decision, or as decided if there was no time.
const gained = (r) => r.speedup !== null ? [r.speedup, r.speedup_low, r.speedup_high] : r.decided !== null && !r.returned_original ? [r.decided, r.decided_low, r.decided_high] : [null, null, null];

function batchHero(b) {
  const measured = b.rows.filter((r) => r.speedup !== null), unchanged = b.rows.filter((r) => r.returned_original).length;
  const best = Math.max(...measured.map((r) => r.speedup)), least = Math.min(...measured.map((r) => r.speedup));
  const faster = b.rows.filter((r) => gained(r)[1] !== null && gained(r)[1] > 1).length;
  const title = faster ? `${faster} of ${plural(b.models, "model")} clearly faster` : b.done ? `${b.done} of ${plural(b.models, "model")} done` : b.failed ? "No model could be done" : "Nothing is done yet";
  const lead = [
    measured.length ? `${plural(measured.length, "result")} measured: from ${least.toFixed(3)} to ${best.toFixed(3)} times as fast, ${b.mean_speedup.toFixed(3)} in the geometric mean.` : null,
    unchanged ? `${plural(unchanged, "model")} kept unchanged, since nothing faster was found.` : null,
    b.waiting.length ? `${b.interrupted ? "Interrupted: " : ""}${plural(b.waiting.length, "model")} to go: the same command goes on.` : null].filter(Boolean).join(" ");
  return el("section", {class: "hero", id: "summary"}, el("h1", {class: b.failed ? "warn" : faster ? "good" : null}, title), el("p", {class: "lead"}, lead),
    el("dl", {class: "facts"}, fact("done", `${b.done} of ${b.models}`, b.earlier ? `${b.earlier} by earlier runs` : null, b.done === b.models ? "good" : null),
      fact("failed", String(b.failed), null, b.failed ? "bad" : null),
      fact("verified", String(b.rows.filter((r) => r.verified === true).length), "same function as the original"),
      fact("unchanged", String(unchanged), "nothing faster was found"),
      fact("time", `${b.seconds.toFixed(0)} s`, "of this run")));
}

// A name in full is the title: long ones are cut in the middle, since their ends tell them apart.
const cut = (name, most) => name.length > most ? `${name.slice(0, most / 2 - 1)}…${name.slice(-most / 2)}` : name;
const named = (r) => el("bdi", {title: r.name}, cut(r.name, 120));

function batchTable(b) {
  const ms = (v) => v === null ? "–" : v.toFixed(3), machines = new Set(b.rows.map((r) => r.machine).filter(Boolean));
  const rows = [...b.rows, ...b.waiting.map((name) => ({name, error: null, link: null, waiting: true, speedup: null, decided: null, latency_before_ms: null, latency_after_ms: null, seconds: null, notes: []}))];
  const state = (r) => r.waiting ? "waiting" : r.error !== null ? "failed" : r.returned_original ? "unchanged" : gained(r)[0] === null ? "not measured" : gained(r)[1] !== null && gained(r)[1] > 1 ? "faster" : "measured";
  const tone = {failed: "bad", faster: "good", waiting: "soft"};
  return section("models", "Models", "Each name leads to the model's own page, which lies beside this one. Latencies are measured.",
    table("Models", [
      {name: "model", key: (r) => r.name, cell: (r) => r.link ? el("a", {href: r.link}, named(r)) : named(r)},
      {name: "result", key: state, cell: (r) => el("span", {class: tone[state(r)] || null}, state(r))},
      {name: "times as fast", num: true, key: (r) => gained(r)[0], cell: (r) => gained(r)[0] === null ? "–" : gained(r)[0].toFixed(3)},
      {name: "95% interval", num: true, key: (r) => gained(r)[1], cell: (r) => gained(r)[1] === null ? "–" : `${gained(r)[1].toFixed(3)} to ${gained(r)[2].toFixed(3)}${r.speedup === null ? ", as decided" : ""}`},
      {name: "before, ms", num: true, key: (r) => r.latency_before_ms, cell: (r) => ms(r.latency_before_ms)},
      {name: "after, ms", num: true, key: (r) => r.latency_after_ms, cell: (r) => ms(r.latency_after_ms)},
      {name: "operators", num: true, key: (r) => r.nodes_before, cell: (r) => typeof r.nodes_before === "number" ? `${r.nodes_before} → ${r.nodes_after}` : "–"},
      {name: "verified", key: (r) => r.verified === true ? "yes" : r.verified === false ? "no" : "–"},
      ...(machines.size > 1 ? [{name: "machine", key: (r) => r.machine}] : []),
      {name: "seconds", num: true, key: (r) => r.seconds, cell: (r) => r.seconds === null ? "–" : r.seconds.toFixed(1)}], rows));
}

function batchSections(b) {
  const measured = b.rows.filter((r) => r.speedup !== null).sort((x, y) => y.speedup - x.speedup);
  const failures = b.rows.filter((r) => r.error !== null), notes = b.rows.flatMap((r) => r.notes.map((note) => ({name: r.name, note})));
  const most = 60;
  return [batchHero(b), batchTable(b),
    measured.length ? section("faster", "How much faster", `95% intervals of whole models, measured against their originals. The line marks 1: as fast as before.${measured.length > most ? ` The first ${most} are drawn; all are in the table.` : ""}`,
      intervalChart(measured.slice(0, most).map((r) => ({group: "result", name: cut(r.name, 36), median: r.speedup, low: r.speedup_low, high: r.speedup_high, kept: null})))) : null,
    failures.length ? section("failures", "What failed", "The other models are not affected. These are tried again when the command is run again.",
      table("Models that failed", [{name: "model", key: (r) => r.name, cell: named}, {name: "why", key: (r) => r.error}], failures)) : null,
    notes.length ? section("notes", "Notes", null, table("Notes", [{name: "model", key: (r) => r.name, cell: named}, {name: "note", key: (r) => r.note}], notes)) : null,
    whereSection({report: null})].filter(Boolean);
}

function lay(sections) {
  $("content").replaceChildren(...sections, el("footer", {}, "Made by xrlflow. This file is complete: it fetches nothing. How to read it: docs/report.md."));
  $("nav").replaceChildren(...sections.filter((s) => s.dataset.nav).map((s) => el("li", {}, el("a", {href: `#${s.id}`}, s.dataset.nav))));
}

let changes = null;
function show(index) {
  const run = DATA.runs[index];
  charts.clear(); resized.disconnect();
  changes = changesSection(run);
  const sections = [hero(run), DATA.runs.length > 1 ? strategiesSection(index) : null, fasterSection(run), sameSection(run), changes, timeSection(run), searchSection(run), nextSection(run), whereSection(run)].filter(Boolean);
  lay(sections);
  $("run").value = String(index);
  changes.ready();
  document.documentElement.dataset.ready = String(index);
}

function theme() {
  const order = ["auto", "light", "dark"], root = document.documentElement;
  let now = "auto";
  try { now = localStorage.getItem("xrlflow-theme") || "auto"; } catch { /* a file may have no storage */ }
  const set = () => { if (now === "auto") delete root.dataset.theme; else root.dataset.theme = now; $("theme").textContent = `Theme: ${now}`; };
  $("theme").addEventListener("click", () => { now = order[(order.indexOf(now) + 1) % 3]; set(); try { localStorage.setItem("xrlflow-theme", now); } catch { /* then it is for now */ } });
  set();
}

$("model").textContent = DATA.title;
if (DATA.runs.length > 1) {
  $("run-choice").hidden = false;
  $("run").append(...DATA.runs.map((r, i) => el("option", {value: i}, r.name)));
  $("run").addEventListener("change", () => show(+$("run").value));
}
theme();
if (DATA.kind === "batch") {
  lay(batchSections(DATA.batch));
  document.documentElement.dataset.ready = "0";
} else show(0);
window.xrlflow = {data: DATA, views: () => changes.views};
})();
