// The tooltip of a token: its probability, and the alternatives of the same position.

import { formatPercent, formatToken } from "./format.js";

const tip = document.getElementById("tip");

function element(kind, className, text = "") {
  const made = document.createElement(kind);
  made.className = className;
  made.textContent = text;
  return made;
}

function row(name, probability, isOwn) {
  const line = element("div", isOwn ? "row own" : "row");
  const bar = element("i", "bar");
  bar.style.width = `${(100 * probability).toFixed(1)}%`;
  const track = element("span", "track");
  track.append(bar);
  line.append(element("code", "", formatToken(name)), track, element("span", "percent", formatPercent(probability)));
  return line;
}

function table(part) {
  const made = element("div", "rows");
  Object.entries(part.topLogprobs)
    .sort((a, b) => b[1] - a[1])
    .forEach(([name, logProb]) => made.append(row(name, Math.exp(logProb), name === part.name)));
  return made;
}

export function hideTip() {
  tip.hidden = true;
}

export function showTip(target, token) {
  tip.replaceChildren(...token.parts.map(table));
  if (token.parts.length > 1) {
    const head = element("div", "title");
    head.append(element("code", "", formatToken(token.text)));
    head.append(element("span", "note", `of ${token.parts.length} tokens`));
    head.append(element("strong", "", formatPercent(token.probability)));
    tip.prepend(head);
  }
  tip.hidden = false;
  place(target.getClientRects()[0] ?? target.getBoundingClientRect());
}

// Places the tooltip below the token, or above it if there is no room below.
function place(at) {
  const margin = 8;
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.min(Math.max(margin, at.left - 12), document.documentElement.clientWidth - width - margin);
  const isAbove = at.bottom + height + 2 * margin > window.innerHeight && at.top > height + 2 * margin;
  const top = isAbove ? at.top - height - margin : at.bottom + margin;
  tip.style.left = `${left + window.scrollX}px`;
  tip.style.top = `${top + window.scrollY}px`;
}
