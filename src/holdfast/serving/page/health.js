// The view of the store's health: what a check finds, and the saves and collectors at work.
import { ask, askLines } from "./api.js";
import { bytes } from "./charts.js";
import { clean, count, el } from "./elements.js";
import { showError } from "./errors.js";

const COLORS = { error: "c-origin", warning: "c-propagated", note: "c-other" };
const MAX_SHOWN = 500;

export async function openHealth(main, parameters, signal) {
  const list = el("div", { id: "findings" }), verdict = el("p", { id: "verdict-line", role: "status", "aria-live": "polite" });
  const activity = el("div", { id: "activity" }), traffic = el("section", { class: "card", "aria-labelledby": "requests-title", hidden: true });
  const buttons = [false, true].map((isFull) => el("button", { type: "button", "data-read": String(isFull), onclick: () => check(list, verdict, buttons, isFull, signal) }, isFull ? "Read and verify every byte" : "Check the structure"));
  main.append(
    el("section", { class: "card", "aria-labelledby": "health-title" }, el("div", { class: "bar" }, el("h1", { class: "small", id: "health-title" }, "Health"), el("span", { class: "spring" }), buttons), verdict, list),
    el("section", { class: "card", "aria-labelledby": "activity-title" }, el("h2", { id: "activity-title" }, "At work"), activity), traffic);
  const look = async () => {
    try {
      const found = await ask("activity", {}, signal);
      drawActivity(activity, found);
      drawRequests(traffic, found.requests);
    } catch (error) {
      if (error.name !== "AbortError") showError(activity, error);
    }
  };
  check(list, verdict, buttons, false, signal);
  await look();
  const timer = setInterval(look, 5000);
  return { close: () => clearInterval(timer), refresh: look };
}

async function check(list, verdict, buttons, isFull, signal) {
  const counts = { error: 0, warning: 0, note: 0 };
  let shown = 0, isNew = false;
  for (const button of buttons) button.disabled = true;
  list.replaceChildren();
  verdict.textContent = isFull ? "Reading every byte\u2026" : "Checking\u2026";
  try {
    for await (const line of askLines("check", { read: isFull ? "true" : "" }, signal)) {
      if (line.finding) {
        isNew ||= line.finding.code === "config-missing";
        counts[line.finding.severity]++;
        if (shown++ < MAX_SHOWN) list.append(drawFinding(line.finding));
      } else if (isNew && !line.checked.snapshots && !line.checked.manifests && !line.checked.packs) {
        // The first save writes the config.
        list.replaceChildren();
        verdict.replaceChildren(el("span", { class: "pill c-other" }, "Empty"), " Nothing was saved yet.");
      } else verdict.replaceChildren(...summarize(line.checked, counts, isFull));
    }
  } catch (error) {
    if (error.name === "AbortError") return;
    verdict.textContent = "";
    showError(list, error);
  } finally {
    for (const button of buttons) button.disabled = false;
  }
}

function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

function summarize(checked, counts, isFull) {
  const isHealthy = !counts.error && !counts.warning;
  const found = Object.entries(counts).filter(([, number]) => number).map(([kind, number]) => plural(number, kind)).join(", ");
  const depth = isFull ? `${bytes(checked.bytes_read)} were read.` : "Values were not read.";
  return [
    el("span", { class: "pill " + (isHealthy ? "c-equal" : "c-origin") }, isHealthy ? "Healthy" : "Damaged"),
    ` Checked ${plural(checked.snapshots, "snapshot")}, ${plural(checked.manifests, "manifest")}, ${plural(checked.packs, "pack")} and ${plural(checked.chunks, "chunk")}: ${found || "nothing to report"}. ${depth}`,
  ];
}

function drawFinding(finding) {
  return el("div", { class: "finding" }, el("span", { class: "pill " + COLORS[finding.severity] }, finding.severity), " ", el("span", { class: "name" }, clean(finding.message)), finding.advice ? el("p", { class: "muted name" }, clean(finding.advice)) : null);
}

const KINDS = { get: "read objects, or parts of them", head: "ask for the size of an object", list: "list names", put: "write objects", delete: "delete objects" };

// Requests cost money on an object store; a store on a disk makes none.
function drawRequests(card, found) {
  card.hidden = !found;
  if (!found) return;
  const head = el("thead", {}, el("tr", {}, ["Request", "", "Number", "Bytes"].map((title, at) => el(title ? "th" : "td", { scope: title ? "col" : null, class: at > 1 ? "num" : null }, title))));
  const rows = Object.entries(found.kinds).map(([kind, one]) => el("tr", { "data-kind": kind }, el("th", { scope: "row" }, kind.toUpperCase()), el("td", { class: "muted" }, KINDS[kind] || ""), el("td", { class: "num" }, count(one.requests)), el("td", { class: "num" }, one.bytes ? bytes(one.bytes) : "")));
  const total = Object.values(found.kinds).reduce((sum, one) => sum + one.requests, 0);
  card.replaceChildren(el("h2", { id: "requests-title" }, "Requests to the object store"),
    el("p", { class: "muted help" }, `${count(total)} by this process since the server started, ${clean(found.since.replace("T", " ").replace("Z", " UTC"))}. A request that was repeated after a fault of the network counts once.`),
    el("table", { class: "narrow" }, head, el("tbody", {}, rows)));
}

function drawActivity(host, found) {
  const live = found.leases.filter((lease) => lease.standing === "live");
  const rows = live.slice(0, 100).map((lease) => el("tr", {}, el("th", { scope: "row", class: "mono name" }, clean(lease.id)), el("td", {}, clean(lease.purpose || "save")), el("td", {}, clean(lease.host)), el("td", { class: "num" }, `${count(Math.round(lease.age_s))} s ago`)));
  const head = el("thead", {}, el("tr", {}, ["Lease", "Purpose", "Host", "Renewed"].map((title, at) => el("th", { scope: "col", class: at === 3 ? "num" : null }, title))));
  host.replaceChildren(
    live.length ? el("table", {}, head, el("tbody", {}, rows)) : el("p", { class: "muted" }, "No process is saving."),
    el("p", { class: "muted" }, found.marked ? `A collector has marked ${count(found.marked)} files${found.abandoned_marks ? "; it was probably interrupted, and the next gc finishes it" : ""}.` : "No collector is at work."),
    found.bad_packs.length ? el("p", { class: "c-origin" }, "Packs known to be bad: ", el("span", { class: "mono name" }, found.bad_packs.map(clean).join(", "))) : el("p", { class: "muted" }, "No pack is known to be bad."));
}
