// The page. Its address holds the selected checkpoints and the settings, so that a link restores them.

import { listModels, setToken, TokenRequired } from "./api.js";
import { drawChart } from "./chart.js";
import { formatCount } from "./format.js";
import { Panel } from "./panel.js";
import { hideTip, showTip } from "./tip.js";

const POLL_MS = 2000;
const ADDRESS_MS = 250;  // browsers limit the rate of address changes
const NUM_MOST_LIKELY = 5;
const PENALTIES = ["min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"];
const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", ...PENALTIES, "seed"];
const TEXTS = ["system", "schema", "tools"];
const SWITCHES = ["compare", "chat", "shade"];
const $ = (id) => document.getElementById(id);

let models = [];
let latest = {};
let running = new AbortController();
let finished = Promise.resolve();
let addressTimer = 0;
let isChatChosen = false;
const picked = { a: "", b: "" };
const panels = {};
for (const name of ["a", "b"]) {
  panels[name] = new Panel(name, {
    pick: (id) => pick(name, id),
    point: (target, token) => (token ? showTip(target, token) : hideTip()),
  });
  $("panels").append(panels[name].root);
}

// --- state in the address

function readAddress() {
  const kept = new URLSearchParams(location.hash.slice(1));
  for (const id of [...NUMBERS, "prompt", ...TEXTS]) if (kept.has(id)) $(id).value = kept.get(id);
  for (const id of SWITCHES) if (kept.has(id)) $(id).checked = kept.get(id) === "1";
  isChatChosen ||= kept.has("chat");
  picked.a = kept.get("a") ?? picked.a;
  picked.b = kept.get("b") ?? picked.b;
}

function writeAddressSoon() {
  clearTimeout(addressTimer);
  addressTimer = setTimeout(writeAddress, ADDRESS_MS);
}

function writeAddress() {
  const kept = new URLSearchParams();
  for (const name of names()) kept.set(name, picked[name]);
  for (const id of ["temperature", "top_p", "top_k", "max_tokens", "seed", "prompt"]) kept.set(id, $(id).value);
  for (const id of [...PENALTIES, ...TEXTS]) if ($(id).value) kept.set(id, $(id).value);
  for (const id of SWITCHES) kept.set(id, $(id).checked ? "1" : "0");
  history.replaceState(null, "", `#${kept}`);
}

// --- checkpoints

function names() {
  return $("compare").checked ? ["a", "b"] : ["a"];
}

function find(id) {
  return models.find((model) => model.id === (latest[id] ?? id));
}

function describe(model) {
  const loss = model.validation_loss ?? model.train_loss;
  return [
    models.some((other) => other.run !== model.run) && model.step !== null ? model.run : "",
    model.tokens_seen === null ? "" : `${formatCount(model.tokens_seen)} tokens seen`,
    loss === null ? "" : `${model.validation_loss === null ? "training" : "validation"} loss ${loss.toFixed(3)}`,
  ].filter(Boolean).join(" \u00b7 ");
}

function count() {
  if (models.length === 0) return "no checkpoint yet that writes text: the first one will appear here";
  const steps = models.filter((model) => model.step !== null).length;
  const runs = [...new Set(models.map((model) => model.run))].join(", ");
  return steps === 0 ? runs : `${runs} \u00b7 ${steps} checkpoint${steps === 1 ? "" : "s"}`;
}

function option(value, text) {
  const made = document.createElement("option");
  made.value = value;
  made.textContent = text;
  return made;
}

// Lists the newest checkpoint first. A selected checkpoint that was removed stays in the list, marked "removed".
function fillSelect(select, id) {
  const content = JSON.stringify([models.map((model) => model.id), latest, find(id) ? "" : id]);
  if (select.dataset.content === content) {
    select.value = id;
    return;
  }
  select.dataset.content = content;
  const groups = [...new Set(models.map((model) => model.run))].map((run) => {
    const group = document.createElement("optgroup");
    group.label = run;
    const own = models.filter((model) => model.run === run).reverse();
    for (const alias of Object.keys(latest)) {
      if (latest[alias] === own[0].id && alias !== own[0].id) {
        group.append(option(alias, `newest \u2014 step ${own[0].step.toLocaleString("en")}`));
      }
    }
    for (const { id, step } of own) group.append(option(id, step === null ? id : `step ${step.toLocaleString("en")}`));
    return group;
  });
  const gone = find(id) ? [] : [option(id, `${id} (removed)`)];
  select.replaceChildren(...gone, ...(groups.length > 1 ? groups : groups.flatMap((group) => [...group.children])));
  select.value = id;
}

function pick(name, id) {
  picked[name] = id;
  show();
}

// A click on a dot selects it in the only panel, or in the panel whose checkpoint is further away in steps.
function pickByDot(id) {
  if (names().length === 1) return pick("a", id);
  const distance = (name) => Math.abs((find(picked[name])?.step ?? Infinity) - find(id).step);
  return pick(distance("b") < distance("a") ? "b" : "a", id);
}

function show() {
  const isCompare = $("compare").checked;
  panels.b.root.hidden = !isCompare;
  document.body.classList.toggle("is-compare", isCompare);
  document.body.classList.toggle("has-shade", $("shade").checked);
  $("legend").hidden = !$("shade").checked;
  // A model without a chat template would refuse each message.
  const hasChat = names().every((name) => find(picked[name])?.has_chat ?? true);
  $("chat").disabled = !hasChat;
  $("chat").parentElement.title = hasChat ? "" : "This model has no chat template";
  if (!hasChat) $("chat").checked = false;
  else if (!isChatChosen && models.length) $("chat").checked = true;
  isChatChosen ||= models.length > 0;
  const isChat = $("chat").checked;
  document.body.classList.toggle("is-chat", isChat);
  $("clear").hidden = $("system-line").hidden = $("tools-line").hidden = !isChat;
  $("prompt-label").textContent = isChat ? "Message" : "Prompt";
  $("prompt").placeholder = isChat ? "Your message" : "Text to continue";
  $("go").textContent = isChat ? "Send" : "Generate";
  for (const name of names()) {
    const model = find(picked[name]);
    fillSelect(panels[name].select, picked[name]);
    panels[name].facts.textContent = model ? describe(model) : "";
  }
  drawChart($("chart"), models, Object.fromEntries(names().map((name) => [name, find(picked[name])?.id])), pickByDot);
  writeAddressSoon();
}

// A reward model writes no text, so that the page has nothing to ask it.
function onlyWriters(found) {
  const written = found.models.filter((model) => !model.has_scores);
  const isWriter = ([, id]) => written.some((model) => model.id === id);
  return { models: written, latest: Object.fromEntries(Object.entries(found.latest).filter(isWriter)) };
}

async function refresh() {
  try {
    const found = onlyWriters(await listModels());
    const isNew = JSON.stringify(found) !== JSON.stringify({ models, latest });
    models = found.models;
    latest = found.latest;
    $("login").hidden = true;
    $("main").hidden = false;
    if (models.length > 0) {
      picked.a ||= Object.keys(latest)[0];
      picked.b ||= models[0].id;
    }
    $("about").textContent = count();
    if (isNew) show();
  } catch (error) {
    if (error instanceof TokenRequired) askForToken();
    else $("about").textContent = "the server does not respond";
  }
}

function askForToken() {
  $("main").hidden = true;
  $("login").hidden = false;
}

// --- texts

function body(seed) {
  const isChat = $("chat").checked;
  const asked = isChat
    ? { seed, logprobs: true, top_logprobs: NUM_MOST_LIKELY }
    : { prompt: $("prompt").value, seed, logprobs: NUM_MOST_LIKELY };
  for (const id of NUMBERS) {
    if (id !== "seed" && $(id).value !== "") asked[id] = Number($(id).value);
  }
  const schema = readJson("schema", "JSON schema");
  if (schema !== undefined) asked.response_format = { type: "json_schema", json_schema: { name: "page", schema } };
  const tools = isChat ? readJson("tools", "Tools") : undefined;
  if (tools !== undefined) asked.tools = tools;
  return asked;
}

function readJson(id, label) {
  const text = $(id).value.trim();
  if (text === "") return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${label} is not JSON: ${error.message}`);
  }
}

// Requests run one after the other: texts that are still running are stopped first.
function run() {
  running.abort();
  const mine = new AbortController();
  running = mine;
  const begin = () => write(mine.signal);
  finished = finished.then(begin, begin);
}

async function write(signal) {
  if (signal.aborted || ($("chat").checked && $("prompt").value.trim() === "")) return;
  $("go").hidden = true;
  $("stop").hidden = false;
  isAtEnd = true;
  const seed = $("seed").value === "" ? Math.floor(Math.random() * 2 ** 31) : Number($("seed").value);
  let asked;
  try {
    asked = body(seed);
  } catch (error) {
    for (const name of names()) panels[name].error.textContent = error.message;
    $("go").hidden = false;
    $("stop").hidden = true;
    return;
  }
  const message = $("prompt").value;
  const isChat = $("chat").checked;
  const system = $("system").value.trim();
  if (isChat) $("prompt").value = "";
  try {
    await Promise.all(
      names().map((name) => {
        const ofPanel = { ...asked, model: picked[name] };
        return isChat ? panels[name].chat(ofPanel, system, message, signal) : panels[name].run(ofPanel, signal);
      }),
    );
  } catch (error) {
    if (!(error instanceof TokenRequired)) throw error;
    askForToken();
  } finally {
    $("go").hidden = false;
    $("stop").hidden = true;
  }
}

// Another kind of request, or a new chat, begins with empty panels.
function clear() {
  for (const panel of Object.values(panels)) panel.clear();
}

// --- events

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
$("ask").addEventListener("keydown", (event) => {
  // Enter also ends the composition of a character, which must not send.
  const isText = event.target === $("prompt") && !event.shiftKey && !event.isComposing;
  if (event.key !== "Enter" || !(isText || event.ctrlKey || event.metaKey)) return;
  event.preventDefault();
  run();
});
$("ask").addEventListener("input", () => show());
$("stop").addEventListener("click", () => running.abort());
for (const id of ["chat", "clear"]) {
  $(id).addEventListener(id === "chat" ? "change" : "click", () => {
    running.abort();
    finished = finished.then(clear, clear);
  });
}
$("login").addEventListener("submit", async (event) => {
  event.preventDefault();
  setToken($("token").value);
  $("login-error").textContent = "";
  await refresh();
  if (!$("login").hidden) $("login-error").textContent = "Wrong token: enter the token that this server was started with.";
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape") hideTip();
});
addEventListener("scroll", hideTip, { passive: true });

// A text that grows stays in view, unless the reader has scrolled away from its end.
let isAtEnd = true;
addEventListener("scroll", () => {
  isAtEnd = innerHeight + scrollY >= document.documentElement.scrollHeight - 40;
}, { passive: true });
new ResizeObserver(() => {
  if (isAtEnd && document.querySelector(".is-running")) scrollTo(0, document.documentElement.scrollHeight);
}).observe($("panels"));
addEventListener("resize", () => show());
addEventListener("hashchange", () => {
  readAddress();
  show();
});

readAddress();
await refresh();
setInterval(() => {
  if (!document.hidden && $("login").hidden) refresh();
}, POLL_MS);
