// Starts the page: chooses the view of the address, and looks for new snapshots every few seconds.
import { ask, takeToken } from "./api.js";
import { openCache } from "./cache.js";
import { openCompare } from "./compare.js";
import { openHealth } from "./health.js";
import { openMovement } from "./movement.js";
import { openRun } from "./run.js";
import { openRuns } from "./runs.js";
import { openSharing } from "./sharing.js";
import { byId, clean, el } from "./elements.js";
import { showError } from "./errors.js";
import { address, readRoute } from "./router.js";
import { openSnapshot } from "./snapshot.js";
import { openSnapshots } from "./snapshots.js";
import { openTensor } from "./tensor.js";
import { startTheme } from "./theme.js";

const POLL_MS = 2500;
const VIEWS = {
  snapshots: { open: openSnapshots, title: "Snapshots" },
  snapshot: { open: openSnapshot, title: "Snapshot" },
  tensor: { open: openTensor, title: "Tensor" },
  compare: { open: openCompare, title: "Compare" },
  movement: { open: openMovement, title: "Movement" },
  sharing: { open: openSharing, title: "Sharing" },
  runs: { open: openRuns, title: "Runs" },
  run: { open: openRun, title: "Run" },
  cache: { open: openCache, title: "Cache" },
  health: { open: openHealth, title: "Health" },
};
const MENU = ["snapshots", "compare", "sharing", "runs", "cache", "health"];
const shown = { close: null, refresh: null, watches: "state", marks: null, abort: new AbortController() };

async function showRoute() {
  const { view, parameters } = readRoute();
  const found = Object.hasOwn(VIEWS, view) ? VIEWS[view] : null;
  shown.abort.abort();
  shown.abort = new AbortController();
  if (shown.close) shown.close();
  Object.assign(shown, { close: null, refresh: null, watches: "state" });
  const main = byId("main");
  byId("tip").hidden = true;
  main.replaceChildren();
  for (const link of byId("nav").children) link.setAttribute("aria-current", String(link.dataset.view === view ? "page" : "false"));
  if (!found) {
    showError(main, new Error("There is no such view: choose one above."));
    return;
  }
  document.title = [parameters.leaf || parameters.name, found.title, "Holdfast"].filter(Boolean).map(clean).join(" \u00b7 ");
  try {
    const opened = await found.open(main, parameters, shown.abort.signal);
    Object.assign(shown, opened);
  } catch (error) {
    if (error.name !== "AbortError") showError(main, error);
  }
}

async function look() {
  if (document.hidden) return;
  try {
    const marks = await ask("changes"), before = shown.marks;
    shown.marks = marks;
    byId("live").textContent = "Live";
    byId("live").classList.remove("c-origin");
    if (before && shown.refresh && before[shown.watches] !== marks[shown.watches]) await shown.refresh();
  } catch (error) {
    byId("live").textContent = clean(error.message);
    byId("live").classList.add("c-origin");
  }
}

async function start() {
  takeToken();
  startTheme(byId("theme"));
  for (const view of MENU) byId("nav").append(el("a", { href: address(view), "data-view": view }, VIEWS[view].title));
  byId("skip").addEventListener("click", (event) => { event.preventDefault(); byId("main").focus(); });
  document.addEventListener("keydown", (event) => {
    const box = document.querySelector("input[type=search]");
    if (event.key === "/" && box && !["INPUT", "SELECT", "TEXTAREA"].includes(document.activeElement.tagName)) {
      event.preventDefault();
      box.focus();
    }
  });
  window.addEventListener("hashchange", () => { takeToken(); showRoute(); });
  await showRoute();
  try {
    const store = await ask("store");
    byId("store").replaceChildren(el("bdi", {}, clean(store.store)));
    byId("store").title = clean(store.store);
  } catch {
    // The view has shown the error already.
  }
  await look();
  setInterval(look, POLL_MS);
}

start();
