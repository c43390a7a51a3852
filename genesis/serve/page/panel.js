// One panel: the checkpoint that generates the text, its tokens, and their probabilities.

import { complete, TokenRequired } from "./api.js";

// Tokens of this surprise or more get the darkest shade.
const DARKEST_NATS = 7;
const ENDINGS = { length: "reached max tokens", tool_calls: "calls a tool" };

// Shows a call of a tool as name(arguments). Arguments come in pieces: the next call, or the end, closes them.
class TurnText {
  #isOpen = false;
  #isEmpty = true;

  // Returns the text of a stream's next event.
  write(choice) {
    let text = choice.delta.content ?? "";
    for (const call of choice.delta.tool_calls ?? []) {
      if (call.function.name) {
        text += `${this.#close()}${this.#isEmpty && text === "" ? "" : "\n"}${call.function.name}(`;
        this.#isOpen = true;
      }
      text += call.function.arguments ?? "";
    }
    if (choice.finish_reason) text += this.#close();
    this.#isEmpty &&= text === "";
    return text;
  }

  #close() {
    const closing = this.#isOpen ? ")" : "";
    this.#isOpen = false;
    return closing;
  }
}

export class Panel {
  // `hooks` has pick(id): the user selected a checkpoint; point(element, token): the pointer is on a token, or null.
  constructor(name, hooks) {
    this.root = document.getElementById("panel").content.firstElementChild.cloneNode(true);
    this.root.dataset.name = name;
    this.select = this.root.querySelector("select");
    this.text = this.root.querySelector(".text");
    this.facts = this.root.querySelector(".facts");
    this.error = this.root.querySelector(".error");
    this.foot = this.root.querySelector(".foot");
    this.copy = this.root.querySelector(".copy");
    this.tokens = new Map();
    this.messages = [];
    this.hooks = hooks;
    this.select.addEventListener("change", () => hooks.pick(this.select.value));
    this.copy.addEventListener("click", () => this.#copy());
    this.text.addEventListener("pointerover", (event) => this.#point(event.target));
    this.text.addEventListener("pointerleave", () => hooks.point(null, null));
    this.text.addEventListener("click", (event) => this.#point(event.target));
    this.text.addEventListener("focusin", (event) => this.#point(event.target));
    this.text.addEventListener("focusout", () => hooks.point(null, null));
    this.text.addEventListener("keydown", (event) => this.#move(event));
  }

  // Continues the prompt until the text ends, the user stops it, or an error occurs, which the panel shows.
  async run(body, signal) {
    this.#begin();
    this.target = this.text;
    const span = document.createElement("span");
    span.className = "prompt";
    span.textContent = body.prompt;
    this.text.replaceChildren(span);
    await this.#follow(body, signal, (choice) => this.#append(choice));
  }

  // Sends a message of the user with the system prompt and the turns before it, and shows the answer under it.
  async chat(body, system, message, signal) {
    this.#begin();
    if (this.messages.length === 0) this.text.replaceChildren();
    const asked = { role: "user", content: message };
    this.#addTurn("turn user").textContent = message;
    this.target = this.#addTurn("turn");
    let answer = "";
    const turn = new TurnText();
    const head = system === "" ? [] : [{ role: "system", content: system }];
    const isWhole = await this.#follow({ ...body, messages: [...head, ...this.messages, asked] }, signal, (choice) => {
      const text = turn.write(choice);
      answer += text;
      this.#appendTurn(choice, text);
    });
    // A turn that failed is not part of the conversation; one that the user stopped is.
    if (isWhole || answer !== "") this.messages.push(asked, { role: "assistant", content: answer });
  }

  // Forgets the conversation.
  clear() {
    this.#begin();
    this.messages = [];
    this.text.replaceChildren();
    this.foot.textContent = "";
    this.copy.hidden = true;
  }

  // Copies the last answer, or the prompt with its continuation.
  async #copy() {
    const text = this.target.textContent;
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else {
      // Browsers offer the clipboard only to pages of this machine, or by https.
      getSelection().selectAllChildren(this.target);
      document.execCommand("copy");
      getSelection().removeAllRanges();
    }
    this.copy.textContent = "Copied";
    setTimeout(() => (this.copy.textContent = "Copy"), 1500);
  }

  // Gives each event's choice to `append`, and returns whether the text has ended.
  async #follow(body, signal, append) {
    const begun = performance.now();
    let reason = null;
    this.root.classList.add("is-running");
    this.foot.textContent = "waiting";
    try {
      for await (const event of complete(body, signal)) {
        append(event.choices[0]);
        reason = event.choices[0].finish_reason ?? reason;
        this.#showProgress(begun, "");
      }
      this.#showProgress(begun, ENDINGS[reason] ?? "end of text");
    } catch (error) {
      this.#showProgress(begun, "stopped");
      if (error instanceof TokenRequired) throw error;
      if (!signal.aborted) {
        this.foot.textContent = "";
        this.error.textContent = error instanceof TypeError ? "The server does not respond." : error.message;
      }
    } finally {
      // After the last text has been laid out, so that the page still follows it.
      requestAnimationFrame(() => requestAnimationFrame(() => this.root.classList.remove("is-running")));
    }
    return reason !== null;
  }

  #addTurn(name) {
    const turn = document.createElement("div");
    turn.className = name;
    this.text.append(turn);
    return turn;
  }

  #turnTo(name) {
    if (this.target.className !== name && this.target.hasChildNodes()) this.target = this.#addTurn(name);
    this.target.className = name;
  }

  #begin() {
    this.hooks.point(null, null);
    this.tokens.clear();
    this.numTokens = 0;
    this.sumLogProb = 0;
    this.waiting = [];
    this.error.textContent = "";
  }

  // Offsets count Unicode characters, as in Python, not the UTF-16 units of JavaScript strings.
  #append(choice) {
    const characters = Array.from(choice.text);
    const { tokens, token_logprobs, top_logprobs, text_offset } = choice.logprobs;
    tokens.forEach((name, index) => {
      const start = text_offset[index] - text_offset[0];
      const end = index + 1 < tokens.length ? text_offset[index + 1] - text_offset[0] : characters.length;
      const text = characters.slice(start, end).join("");
      const token = { name, logProb: token_logprobs[index], topLogprobs: top_logprobs[index] };
      this.numTokens += 1;
      this.sumLogProb += token.logProb;
      this.waiting.push(token);
      // A character that spans several tokens is shown with the last of them.
      const isEnd = choice.finish_reason !== null && index + 1 === tokens.length;
      if (text !== "" || isEnd) this.#show(text);
    });
  }

  // An event of a chat has no offsets: its tokens are shown together, which are more than one only if they came together.
  // Reasoning has turns of its own, which are no part of the answer. An event with both shows its tokens in both.
  #appendTurn(choice, text) {
    for (const token of choice.logprobs?.content ?? []) {
      const topLogprobs = Object.fromEntries(token.top_logprobs.map((other) => [other.token, other.logprob]));
      this.numTokens += 1;
      this.sumLogProb += token.logprob;
      this.waiting.push({ name: token.token, logProb: token.logprob, topLogprobs });
    }
    const tokens = this.waiting;
    const reasoning = choice.delta.reasoning_content ?? "";
    if (tokens.length > 0 && reasoning !== "") {
      this.#turnTo("turn reasoning");
      this.#show(reasoning);
      if (text !== "") this.waiting = tokens;
    }
    if (text !== "") this.#turnTo("turn");
    if (this.waiting.length > 0 && (text !== "" || choice.finish_reason)) this.#show(text);
  }

  #show(text) {
    const parts = this.waiting;
    this.waiting = [];
    const span = document.createElement("span");
    const logProb = parts.reduce((sum, token) => sum + token.logProb, 0);
    const probability = Math.exp(logProb);
    span.className = text === "" ? "token end" : "token";
    span.textContent = text;
    span.tabIndex = this.tokens.size === 0 ? 0 : -1;
    span.style.setProperty("--surprise", Math.min(1, -logProb / DARKEST_NATS).toFixed(3));
    span.setAttribute("aria-describedby", "tip");
    this.tokens.set(span, { text, probability, parts });
    this.target.append(span);
    this.copy.hidden = false;
  }

  #showProgress(begun, ending) {
    const parts = [];
    if (this.numTokens > 0) {
      const seconds = (performance.now() - begun) / 1000;
      parts.push(`${this.numTokens} token${this.numTokens === 1 ? "" : "s"}`);
      parts.push(`${(this.numTokens / seconds).toFixed(0)} per second`);
      parts.push(`perplexity ${Math.exp(-this.sumLogProb / this.numTokens).toFixed(1)}`);
    }
    if (ending) parts.push(ending);
    this.foot.textContent = parts.join(" \u00b7 ");
  }

  #point(target) {
    const token = this.tokens.get(target);
    this.hooks.point(token ? target : null, token ?? null);
  }

  // The arrow keys move from token to token; Tab leaves the text.
  #move(event) {
    const steps = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" };
    if (event.key === "Escape") this.hooks.point(null, null);
    const next = event.target[steps[event.key]];
    if (!next || !this.tokens.has(next)) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
}
