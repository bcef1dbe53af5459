// Requests to the server. The token comes with the address that `holdfast serve` printed, and is sent as a header.
const KEY = "holdfast-token";

export class ApiError extends Error {
  constructor(found) {
    super(found.message);
    this.kind = found.kind;
    this.expression = found.expression;
    this.position = found.position;
  }
}

// Takes the token out of the address, so that addresses can be shared without it.
export function takeToken() {
  const found = /^#token=([\w-]+)/.exec(location.hash);
  if (!found) return;
  localStorage.setItem(KEY, found[1]);
  history.replaceState(null, "", location.pathname + "#/snapshots");
}

async function request(path, parameters, signal) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters || {})) {
    for (const each of Array.isArray(value) ? value : [value]) if (each !== "" && each !== undefined && each !== null) query.append(name, each);
  }
  const text = query.toString();
  const headers = { Authorization: "Bearer " + (localStorage.getItem(KEY) || "") };
  let answer;
  try {
    answer = await fetch("/api/v1/" + path + (text ? "?" + text : ""), { headers, signal, cache: "no-store" });
  } catch (error) {
    if (signal && signal.aborted) throw error;
    throw new ApiError({ kind: "Unreachable", message: "The server does not answer: start `holdfast serve` again." });
  }
  if (!answer.ok) throw new ApiError((await answer.json()).error);
  return answer;
}

export async function ask(path, parameters, signal) {
  return (await request(path, parameters, signal)).json();
}

// Yields the lines of a stream as they arrive.
export async function* askLines(path, parameters, signal) {
  const reader = (await request(path, parameters, signal)).body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const found = JSON.parse(line);
      if (found.error) throw new ApiError(found.error);
      yield found;
    }
  }
}
