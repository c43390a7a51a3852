// The requests that the page sends, with a token if the server requires one. The browser keeps the token as long as the tab.

const KEY = "genesis-token";

export class TokenRequired extends Error {}

export function setToken(token) {
  sessionStorage.setItem(KEY, token);
}

function headers() {
  const token = sessionStorage.getItem(KEY);
  return token ? { Authorization: `Bearer ${token}` } : {};
}

async function check(response) {
  if (response.ok) return response;
  let message = `The server responded with status ${response.status}.`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // A proxy in between sent this response, without our JSON. The status is the only information.
  }
  throw response.status === 401 ? new TokenRequired(message) : new Error(message);
}

export async function listModels() {
  const response = await check(await fetch("api/models", { headers: headers() }));
  return response.json();
}

// Yields the events of a completion, or of a chat's next turn if `body` has messages, as they arrive.
export async function* complete(body, signal) {
  const response = await check(
    await fetch(body.messages ? "v1/chat/completions" : "v1/completions", {
      method: "POST",
      headers: { ...headers(), "Content-Type": "application/json" },
      body: JSON.stringify({ ...body, stream: true }),
      signal,
    }),
  );
  let rest = "";
  let isWhole = false;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.slice("data: ".length);
      if (data === "[DONE]") {
        isWhole = true;
        continue;
      }
      const content = JSON.parse(data);
      if (content.error) throw new Error(content.error.message);
      yield content;
    }
  }
  if (!isWhole) throw new Error("The stream ended early: is the server still running?");
}
