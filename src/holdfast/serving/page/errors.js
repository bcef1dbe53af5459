// Errors as sentences; a mistake in an expression is marked.
import { clean, el } from "./elements.js";

export function showError(host, error) {
  const parts = [el("p", { class: "sentence" }, clean(error.message))];
  if (error.expression) {
    const text = error.expression, at = error.position;
    parts.push(el("pre", { class: "mono" }, clean(text.slice(0, at)), el("mark", {}, clean(text.slice(at, at + 1)) || "\u2038"), clean(text.slice(at + 1))));
  }
  host.replaceChildren(el("div", { class: "alarm", role: "alert" }, parts));
}
