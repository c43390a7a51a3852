// The loss of each checkpoint by step: one line per run, one dot per checkpoint.

const HEIGHT = 120;
const EDGE = { left: 44, right: 14, top: 12, bottom: 22 };
const KINDS = [
  ["validation_loss", "validation loss"],
  ["train_loss", "training loss"],
];

function svg(kind, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = text;
  return made;
}

// Returns the loss that most checkpoints have.
function pickKind(models) {
  const count = (field) => models.filter((model) => model[field] !== null).length;
  return KINDS.reduce((best, kind) => (count(kind[0]) > count(best[0]) ? kind : best));
}

function scale(values, low, high) {
  const least = Math.min(...values);
  const span = Math.max(...values) - least || 1;
  return (value) => low + ((value - least) / span) * (high - low);
}

// Draws into `figure`. `picked` maps a panel to its checkpoint id; a click on a dot calls `pick(id)`.
export function drawChart(figure, models, picked, pick) {
  const [field, title] = pickKind(models);
  const shown = models.filter((model) => model.step !== null && model[field] !== null);
  figure.hidden = shown.length < 2;
  if (figure.hidden) return;
  const image = figure.querySelector("svg");
  const width = Math.max(300, image.clientWidth);
  const losses = shown.map((model) => model[field]);
  const steps = shown.map((model) => model.step);
  const x = scale(steps, EDGE.left, width - EDGE.right);
  const y = scale(losses, HEIGHT - EDGE.bottom, EDGE.top);
  image.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  image.replaceChildren();
  for (const loss of new Set([Math.min(...losses), Math.max(...losses)])) {
    image.append(svg("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: y(loss), y2: y(loss) }));
    image.append(svg("text", { x: EDGE.left - 8, y: y(loss) + 4, "text-anchor": "end" }, loss.toFixed(2)));
  }
  for (const [step, anchor] of [[Math.min(...steps), "start"], [Math.max(...steps), "end"]]) {
    image.append(svg("text", { x: x(step), y: HEIGHT - 4, "text-anchor": anchor }, step.toLocaleString("en")));
  }
  for (const run of new Set(shown.map((model) => model.run))) {
    const points = shown.filter((model) => model.run === run).map((model) => `${x(model.step)},${y(model[field])}`);
    image.append(svg("polyline", { class: "curve", points: points.join(" ") }));
  }
  for (const model of shown) {
    const names = Object.keys(picked).filter((name) => picked[name] === model.id);
    const dot = svg("g", { class: ["dot", ...names].join(" "), transform: `translate(${x(model.step)} ${y(model[field])})` });
    dot.append(svg("title", {}, `${model.id}: ${title} ${model[field].toFixed(3)}`));
    dot.append(svg("circle", { class: "target", r: 14 }));
    for (const name of names) dot.append(svg("circle", { class: `ring ${name}`, r: name === "b" && names.length > 1 ? 10 : 7 }));
    dot.append(svg("circle", { class: "point", r: 3.5 }));
    dot.addEventListener("click", () => pick(model.id));
    image.append(dot);
  }
  figure.querySelector("figcaption").textContent = `${title} by step`;
}
