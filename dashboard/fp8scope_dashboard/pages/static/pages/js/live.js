// Receives the server's events and refreshes the page: charts by fp8:change, parts of the page by parts.js. A hidden tab
// closes its stream, because browsers allow few connections.

import { firstChart } from "./first_chart.js";
import { noteChange } from "./parts.js";

const { events: source, since } = document.body.dataset;
const indicator = document.querySelector("[data-live]");
const WORDS = { live: "Live", polling: "Live, every 2 s", waiting: "Reconnecting…", paused: "Paused", off: "" };
// Milliseconds. Changes that come together are shown together; the first one of a while is shown at once.
const GATHER = 40;
const CHARTS_INTERVAL = 300;
const OFFLINE_INTERVAL = 10000;

let stream = null;
let retry = null;
let failures = 0;
let wasConnected = false;

const showState = (state) => {
  if (!indicator || indicator.dataset.shown === state) return;
  indicator.dataset.shown = state;
  indicator.dataset.state = state === "polling" ? "live" : state;
  indicator.querySelector("span").textContent = WORDS[state];
};

// Calls `act` with the kinds of changes since the last call, at most once in `interval`.
const gathered = (interval, act) => {
  let kinds = new Set();
  let timer = null;
  let last = -Infinity;
  const flush = (all = false) => {
    clearTimeout(timer);
    timer = null;
    last = performance.now();
    const detail = { kinds, all };
    kinds = new Set();
    act(detail);
  };
  const note = (kind) => {
    kinds.add(kind);
    timer ??= setTimeout(flush, Math.max(GATHER, last + interval - performance.now()));
  };
  return { note, flush };
};

const charts = gathered(CHARTS_INTERVAL, (detail) => document.dispatchEvent(new CustomEvent("fp8:change", { detail })));
const refreshAll = () => {
  charts.flush(true);
  noteChange();
};
const note = (kind) => {
  charts.note(kind);
  noteChange(kind);
};

const connect = () => {
  clearTimeout(retry);
  stream?.close();
  stream = new EventSource(`${source}?since=${since}`);
  stream.addEventListener("ready", (event) => {
    const hasMissed = wasConnected || failures > 0;
    const { source: kind, changed } = JSON.parse(event.data);
    failures = 0;
    showState(kind === "polling" ? "polling" : "live");
    // Catch up with what changed while the page was disconnected, or between its rendering and now.
    if (hasMissed || !changed) refreshAll();
    else changed.forEach(note);
    wasConnected = true;
  });
  stream.addEventListener("change", (event) => note(JSON.parse(event.data).kind));
  stream.addEventListener("busy", () => again(30000));
  stream.addEventListener("error", () => {
    showState("waiting");
    if (stream.readyState === EventSource.CLOSED) again(Math.min(60000, 2000 * 2 ** failures));
    failures += 1;
  });
};

const again = (delay) => {
  stream?.close();
  clearTimeout(retry);
  retry = setTimeout(() => { refreshAll(); connect(); }, Math.max(delay, 2000));
};

if (source) {
  // A browser draws the first chart sooner if the server does not refresh parts meanwhile.
  firstChart.then(() => { if (!stream && !document.hidden) connect(); });
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      stream?.close();
      clearTimeout(retry);
      showState("paused");
    } else connect();
  });
  addEventListener("pagehide", () => stream?.close());
  addEventListener("pageshow", (event) => { if (event.persisted) connect(); });
  setInterval(() => {
    if (!document.hidden && stream && stream.readyState !== EventSource.OPEN) refreshAll();
  }, OFFLINE_INTERVAL);
  // Keep ages such as "12 s ago" current without events.
  setInterval(() => {
    if (!document.hidden) {
      const head = document.querySelector("[data-ticks]");
      if (head && !head.querySelector("details[open]")) window.htmx?.trigger(head, "fp8:refresh");
    }
  }, 15000);
}

// hx-preserve keeps a row's image when the row is replaced; a newer image replaces it once it is loaded.
document.addEventListener("htmx:afterSettle", () => {
  for (const row of document.querySelectorAll("[data-spark]")) {
    const image = row.querySelector("img");
    if (!image || image.getAttribute("src") === row.dataset.spark || image.dataset.next === row.dataset.spark) continue;
    image.dataset.next = row.dataset.spark;
    const next = new Image();
    next.addEventListener("load", () => { image.src = next.src; image.setAttribute("src", row.dataset.spark); });
    next.src = row.dataset.spark;
  }
});
