// Formats numbers and tokens for people.

export function formatPercent(probability) {
  const percent = 100 * probability;
  if (percent >= 99.95) return "100%";
  if (percent >= 10) return `${percent.toFixed(0)}%`;
  if (percent >= 1) return `${percent.toFixed(1)}%`;
  return percent >= 0.01 ? `${percent.toFixed(2)}%` : "< 0.01%";
}

export function formatCount(count) {
  for (const [unit, size] of [["T", 1e12], ["B", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (count >= size) return `${(count / size).toFixed(count >= 100 * size ? 0 : 1)} ${unit}`;
  }
  return String(count);
}

// Returns a token with visible white space.
export function formatToken(name) {
  const byte = /^bytes:\\x(..)$/.exec(name);
  if (byte) return `\u27e8${byte[1]}\u27e9`;
  return name.replaceAll(" ", "\u00b7").replaceAll("\n", "\u21b5").replaceAll("\t", "\u21e5").replaceAll("\r", "\u240d");
}
