// Listens to the server's events and has what is visible refreshed: charts by fp8:change, parts of the page
// (data-refresh-on="rows state") by htmx. A hidden tab listens to nothing: browsers allow few connections.

const source = document.body.dataset.events;
const indicator = document.querySelector("[data-live]");
const WORDS = { live: "Live", polling: "Live, every 2 s", waiting: "Reconnecting…", paused: "Paused", off: "" };
// Parts are refreshed at most this often, and without news this often while there is no connection.
const PAUSE = 1000;
const WITHOUT_NEWS = 10000;

let stream = null;
let kinds = new Set();
let timer = null;
let retry = null;
let failures = 0;
let wasConnected = false;

const say = (state) => {
  if (!indicator || indicator.dataset.said === state) return;
  indicator.dataset.said = state;
  indicator.dataset.state = state === "polling" ? "live" : state;
  indicator.querySelector("span").textContent = WORDS[state];
};

const flush = (all = false) => {
  const detail = { kinds, all };
  kinds = new Set();
  document.dispatchEvent(new CustomEvent("fp8:change", { detail }));
  for (const element of document.querySelectorAll("[data-refresh-on]")) {
    const wanted = element.dataset.refreshOn.split(" ");
    // Nobody likes text that vanishes while it is read, or a form while it is filled in.
    const isInUse = element.querySelector("details[open]") || element.querySelector("input:focus, select:focus");
    if (!isInUse && (all || wanted.some((kind) => detail.kinds.has(kind)))) window.htmx?.trigger(element, "fp8:refresh");
  }
};

const note = (kind) => {
  kinds.add(kind);
  timer ??= setTimeout(() => { timer = null; flush(); }, kinds.has("alert") ? 100 : PAUSE);
};

const connect = () => {
  clearTimeout(retry);
  stream?.close();
  stream = new EventSource(source);
  stream.addEventListener("ready", (event) => {
    failures = 0;
    say(JSON.parse(event.data).source === "polling" ? "polling" : "live");
    // What happened while nobody listened.
    if (wasConnected) flush(true);
    // What changes rarely, and has changed between the page's rendering and now, would not be told again.
    else for (const element of document.querySelectorAll("[data-catch-up]")) window.htmx?.trigger(element, "fp8:refresh");
    wasConnected = true;
  });
  stream.addEventListener("change", (event) => note(JSON.parse(event.data).kind));
  stream.addEventListener("busy", () => again(30000));
  stream.addEventListener("error", () => {
    say("waiting");
    if (stream.readyState === EventSource.CLOSED) again(Math.min(60000, 2000 * 2 ** failures));
    failures += 1;
  });
};

const again = (delay) => {
  stream?.close();
  clearTimeout(retry);
  retry = setTimeout(() => { flush(true); connect(); }, Math.max(delay, 2000));
};

if (source) {
  connect();
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      stream?.close();
      clearTimeout(retry);
      say("paused");
    } else connect();
  });
  addEventListener("pagehide", () => stream?.close());
  addEventListener("pageshow", (event) => { if (event.persisted) connect(); });
  setInterval(() => {
    if (!document.hidden && stream?.readyState !== EventSource.OPEN) flush(true);
  }, WITHOUT_NEWS);
  // "12 s ago" must not stand still while nothing comes.
  setInterval(() => {
    if (!document.hidden) {
      const head = document.querySelector("[data-ticks]");
      if (head && !head.querySelector("details[open]")) window.htmx?.trigger(head, "fp8:refresh");
    }
  }, 15000);
}

// The list's small images stay in place (hx-preserve) while rows are replaced; a newer one is put in when it is loaded.
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
