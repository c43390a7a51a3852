// What the page asks the server, with the token where one is wanted. The token lives as long as the tab.

const KEY = "genesis-token";

export class WantsToken extends Error {}

export function setToken(token) {
  sessionStorage.setItem(KEY, token);
}

function headers() {
  const token = sessionStorage.getItem(KEY);
  return token ? { Authorization: `Bearer ${token}` } : {};
}

async function check(response) {
  if (response.ok) return response;
  let message = `The server answered ${response.status}.`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // Not ours: something between the server and us. The status has to do.
  }
  throw response.status === 401 ? new WantsToken(message) : new Error(message);
}

export async function listModels() {
  const response = await check(await fetch("api/models", { headers: headers() }));
  return response.json();
}

// Yields the events of a completion as they come.
export async function* complete(body, signal) {
  const response = await check(
    await fetch("v1/completions", {
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
  if (!isWhole) throw new Error("The stream broke off: is the server still there?");
}
