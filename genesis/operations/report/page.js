// Values under the pointer, and a part of a chart drawn larger. The charts are there without this script.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const MIN_DRAG = 6; // pixels; less is a click

// 0.02, 1,234.5, 2.5M: as on the axes, with one digit more.
function show(value) {
  for (const [bound, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"]]) {
    if (Math.abs(value) >= bound) return `${+(value / bound).toPrecision(5)}${unit}`;
  }
  if (Math.abs(value) >= 1000) return Math.round(value * 10 % 10) ? value.toLocaleString("en", { maximumFractionDigits: 1 }) : value.toLocaleString("en");
  return `${+value.toPrecision(5)}`;
}

function element(kind, attributes, parent) {
  const made = document.createElementNS(SVG, kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  parent.append(made);
  return made;
}

// Round numbers between two limits.
function ticks(low, high) {
  const raw = (high - low) / 4;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw);
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high; at += 1) found.push(at * step);
  return found;
}

class Plot {
  constructor(figure) {
    this.figure = figure;
    this.svg = figure.querySelector("svg");
    this.plot = JSON.parse(figure.dataset.plot);
    this.whole = { x: this.plot.x, y: this.plot.y };
    this.shown = this.whole;
    [this.left, this.top, this.width, this.height] = this.plot.box;
    for (const one of this.plot.series) {
      one.pairs = [];
      for (let at = 0; at < one.points.length; at += 2) one.pairs.push([one.points[at], one.points[at + 1]]);
      one.pairs.sort((a, b) => a[0] - b[0]);
    }
    this.zoomed = element("g", { class: "zoom" }, this.svg);
    this.over = element("g", { class: "over" }, this.svg);
    this.tip = document.createElement("div");
    this.tip.className = "tip";
    this.tip.hidden = true;
    this.reset = document.createElement("button");
    this.reset.textContent = "whole chart";
    this.reset.hidden = true;
    this.reset.addEventListener("click", () => this.zoom(null));
    figure.append(this.tip, this.reset);
    this.svg.style.touchAction = "pan-y";
    this.svg.addEventListener("pointermove", (event) => this.move(event));
    this.svg.addEventListener("pointerdown", (event) => this.press(event));
    this.svg.addEventListener("pointerup", (event) => this.release(event));
    this.svg.addEventListener("pointercancel", () => this.leave());
    this.svg.addEventListener("pointerleave", () => this.leave());
    this.svg.addEventListener("dblclick", () => this.zoom(null));
    this.svg.tabIndex = 0;
    this.svg.addEventListener("keydown", (event) => this.key(event));
    this.svg.addEventListener("blur", () => this.leave());
  }

  isShown(one) {
    return document.getElementById(`show-${one.run}`)?.checked ?? true;
  }

  height01(y) {
    const [low, high] = this.shown.y;
    if (!this.plot.is_log) return (y - low) / (high - low);
    return (Math.log(y) - Math.log(low)) / (Math.log(high) - Math.log(low));
  }

  toX(x) {
    const [low, high] = this.shown.x;
    return this.left + ((x - low) / (high - low)) * this.width;
  }

  toY(y) {
    return this.top + (1 - this.height01(y)) * this.height;
  }

  // The place of the pointer on the horizontal axis; null outside of the axes.
  place(event) {
    const box = this.svg.getBoundingClientRect();
    const scale = this.svg.viewBox.baseVal.width / box.width;
    const x = (event.clientX - box.left) * scale;
    const y = (event.clientY - box.top) * scale;
    const slack = this.pressed === undefined ? 4 : 1e4;
    if (x < this.left - slack || x > this.left + this.width + slack) return null;
    if (y < this.top - slack || y > this.top + this.height + slack) return null;
    const [low, high] = this.shown.x;
    return Math.min(high, Math.max(low, low + ((x - this.left) / this.width) * (high - low)));
  }

  move(event) {
    const at = this.place(event);
    if (at === null) return this.leave();
    this.point(at);
    if (this.pressed !== undefined && Math.abs(event.clientX - this.pressedAt) >= MIN_DRAG) {
      const [a, b] = [this.toX(this.pressed), this.toX(at)].sort((one, two) => one - two);
      element("rect", { x: a, y: this.top, width: b - a, height: this.height, class: "chosen" }, this.over);
    }
  }

  press(event) {
    const at = this.place(event);
    if (at === null) return;
    if (event.pointerType === "mouse" && this.plot.has_zoom) {
      this.pressed = at;
      this.pressedAt = event.clientX;
      this.svg.setPointerCapture(event.pointerId);
    }
    this.point(at);
  }

  release(event) {
    const from = this.pressed;
    const to = this.place(event);
    this.pressed = undefined;
    if (from === undefined || to === null || Math.abs(event.clientX - this.pressedAt) < MIN_DRAG) return;
    this.zoom([Math.min(from, to), Math.max(from, to)]);
  }

  // The arrow keys go from value to value; Escape shows the whole chart.
  key(event) {
    if (event.key === "Escape") return this.zoom(null);
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const all = this.places();
    const next = step > 0 ? all.find((x) => this.at === undefined || x > this.at) : all.findLast((x) => this.at === undefined || x < this.at);
    if (next !== undefined) this.point(next);
  }

  places() {
    const [low, high] = this.shown.x;
    const found = this.plot.series.filter((one) => this.isShown(one)).flatMap((one) => one.pairs.map((pair) => pair[0]));
    return [...new Set(found)].filter((x) => x >= low && x <= high).sort((a, b) => a - b);
  }

  leave() {
    if (this.pressed !== undefined) return;
    this.at = undefined;
    this.over.replaceChildren();
    this.tip.hidden = true;
  }

  // Shows the values at the logged place nearest to `at`.
  point(at) {
    this.over.replaceChildren();
    const all = this.places();
    if (all.length === 0) return;
    const x = all.reduce((best, each) => (Math.abs(each - at) < Math.abs(best - at) ? each : best));
    this.at = x;
    element("line", { x1: this.toX(x), x2: this.toX(x), y1: this.top, y2: this.top + this.height, class: "cross" }, this.over);
    const lines = [`${this.plot.clock}: ${show(x)}`];
    let sum = 0;
    for (const one of this.plot.series.filter((each) => this.isShown(each))) {
      const pair = one.kind === "line" || one.kind === "area" ? nearest(one.pairs, x) : one.pairs.find((each) => each[0] === x);
      if (!pair || pair[0] < this.shown.x[0] || pair[0] > this.shown.x[1]) continue;
      sum += one.kind === "area" ? pair[1] : 0;
      const there = pair[0] === x ? "" : ` (at ${show(pair[0])})`;
      lines.push([one, one.kind === "line" || one.kind === "area" ? `${show(pair[1])}${there}` : ""]);
      const height = one.kind === "area" ? sum : pair[1];
      if (one.kind !== "edge") {
        element("circle", { cx: this.toX(pair[0]), cy: this.toY(height), r: 3, style: `fill:var(${one.colour})` }, this.over);
      }
    }
    this.write(lines, x);
  }

  write([title, ...rows], x) {
    const head = document.createElement("b");
    head.textContent = title;
    const body = rows.map(([one, value]) => {
      const row = document.createElement("div");
      const swatch = document.createElement("i");
      swatch.style.background = `var(${one.colour})`;
      row.append(swatch, `${one.label} ${value}`);
      return row;
    });
    this.tip.replaceChildren(head, ...body);
    this.tip.hidden = false;
    const box = this.svg.getBoundingClientRect();
    const ground = this.figure.getBoundingClientRect();
    const scale = box.width / this.svg.viewBox.baseVal.width;
    const at = box.left - ground.left + this.toX(x) * scale;
    const isRight = at > ground.width / 2;
    this.tip.style.left = isRight ? "" : `${at + 10}px`;
    this.tip.style.right = isRight ? `${ground.width - at + 10}px` : "";
    this.tip.style.top = `${box.top - ground.top + this.top * scale}px`;
  }

  // Draws the part between two places over the chart; null shows the chart as it was.
  zoom(range) {
    this.pressed = undefined;
    this.zoomed.replaceChildren();
    this.over.replaceChildren();
    this.tip.hidden = true;
    this.figure.classList.toggle("is-zoomed", range !== null);
    this.reset.hidden = range === null;
    this.shown = this.whole;
    if (range === null || !this.plot.has_zoom) return;
    const heights = this.heights(range);
    if (heights.length === 0) return this.zoom(null);
    let [low, high] = [heights.reduce((a, b) => Math.min(a, b)), heights.reduce((a, b) => Math.max(a, b))];
    if (this.plot.is_log) {
      const pad = (high / low) ** 0.05 || 1.05;
      [low, high] = low === high ? [low / 1.05, high * 1.05] : [low / pad, high * pad];
    } else {
      const pad = (high - low) * 0.05 || Math.abs(high) * 0.05 || 1;
      [low, high] = [this.plot.series.some((one) => one.kind === "area") ? 0 : low - pad, high + pad];
    }
    this.shown = { x: range, y: [low, high] };
    this.draw();
  }

  heights([from, to]) {
    const lines = this.plot.series.filter((one) => one.kind === "line" && this.isShown(one));
    const found = lines.flatMap((one) => one.pairs.filter(([x]) => x >= from && x <= to).map(([, y]) => y));
    const sums = new Map();
    for (const one of this.plot.series.filter((each) => each.kind === "area")) {
      for (const [x, y] of one.pairs) if (x >= from && x <= to) sums.set(x, (sums.get(x) ?? 0) + y);
    }
    return [...found, ...sums.values()];
  }

  draw() {
    const id = `${this.figure.id}-part`;
    element("rect", { x: this.left, y: this.top, width: this.width, height: this.height }, element("clipPath", { id }, this.zoomed));
    const [right, bottom] = [this.left + this.width, this.top + this.height];
    for (const at of ticks(...this.shown.x)) {
      element("line", { x1: this.toX(at), x2: this.toX(at), y1: this.top, y2: bottom, class: "rule" }, this.zoomed);
      element("text", { x: this.toX(at), y: bottom + 12, "text-anchor": "middle" }, this.zoomed).textContent = show(at);
    }
    for (const at of ticks(...this.shown.y)) {
      element("line", { x1: this.left, x2: right, y1: this.toY(at), y2: this.toY(at), class: "rule" }, this.zoomed);
      element("text", { x: this.left - 5, y: this.toY(at) + 3.5, "text-anchor": "end" }, this.zoomed).textContent = show(at);
    }
    const inside = element("g", { "clip-path": `url(#${id})` }, this.zoomed);
    const floor = new Map();
    for (const one of this.plot.series) {
      const style = { class: `run-${one.run}`, style: `--own:var(${one.colour})` };
      if (one.kind === "area") {
        const tops = one.pairs.map(([x, y]) => [x, (floor.get(x) ?? 0) + y]);
        const below = one.pairs.map(([x]) => [x, floor.get(x) ?? 0]).reverse();
        element("path", { d: `${this.path(tops.concat(below))}Z`, "data-kind": "area", ...style }, inside);
        tops.forEach(([x, y]) => floor.set(x, y));
      } else if (one.kind === "line") {
        element("path", { d: this.path(one.pairs), "data-kind": "line", ...style }, inside);
      } else {
        for (const [x, y] of one.pairs) {
          if (one.kind === "marks") element("circle", { cx: this.toX(x), cy: this.toY(y), r: 3.5, "data-kind": "area", ...style }, inside);
          else element("line", { x1: this.toX(x), x2: this.toX(x), y1: this.top, y2: bottom, "data-kind": "edge", ...style }, inside);
        }
      }
    }
  }

  path(pairs) {
    return pairs.map(([x, y], place) => `${place ? "L" : "M"}${this.toX(x).toFixed(2)} ${this.toY(y).toFixed(2)}`).join("");
  }
}

function nearest(pairs, x) {
  let [low, high] = [0, pairs.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (pairs[middle][0] < x) low = middle + 1;
    else high = middle;
  }
  const before = pairs[low - 1];
  return before && Math.abs(before[0] - x) < Math.abs(pairs[low][0] - x) ? before : pairs[low];
}

for (const figure of document.querySelectorAll("figure[data-plot]")) new Plot(figure);
