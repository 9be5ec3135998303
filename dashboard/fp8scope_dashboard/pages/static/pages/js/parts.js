// Refreshes the parts of the page that changed. Attributes of a part, which needs an id:
//
//   data-refresh-on="rows state"   the kinds of changes after which it is fetched again; htmx does so on fp8:refresh
//   data-refresh-seconds="20"      the shortest time between two refreshes
//
// A part is out of date if a change was announced after the request that brought its content. It stays out of date, and
// is fetched again as soon as possible, while it is loaded, in use, or not yet prepared by htmx. htmx itself would drop a
// refresh that waits for another one, because the answer to that one replaces the element that waits.

const ALL = "*";
// Milliseconds between two refreshes, until an unprepared part is tried again, and until a failed request is repeated.
const INTERVAL = 1000;
const GATHER = 40;
const NOT_STARTED = 100;
const AFTER_FAILURE = 5000;
const MAX_PAUSE = 4000;

// When each kind of change was announced, when each part's content was requested, and the requests under way. Content
// that came with the page was requested at 0: the server announces what changed since.
const changedAt = new Map();
const requestedAt = new WeakMap();
const startOf = new WeakMap();
const loading = new WeakMap();
// By id, because an answer may replace the element: when a part may be requested again.
const notBefore = new Map();

const isRefresh = (detail) => detail.requestConfig?.triggeringEvent?.type === "fp8:refresh";
const isPart = (element) => Boolean(element?.dataset?.refreshOn);

const isOutOfDate = (part) => {
  const kinds = [ALL, ...part.dataset.refreshOn.split(" ")];
  return kinds.some((kind) => changedAt.get(kind) > (requestedAt.get(part) ?? 0));
};
// An open help text, a form that has the focus, or a part that somebody holds is not replaced.
const isInUse = (part) => part.querySelector("details[open], input:not([data-holds]):focus, select:focus, [data-holds]:checked");
// The answer to a click or a search replaces the same part; if a refresh replaced it before, the answer would be lost.
const isReplaced = (part) => [...document.querySelectorAll(".htmx-request")].some(
  (tag) => tag !== part && tag.closest("[hx-target]")?.getAttribute("hx-target") === `#${part.id}`,
);

let timer = null;
let due = Infinity;
let last = -Infinity;

// Look for parts that are out of date in `delay` milliseconds, but not more often than once in INTERVAL.
const look = (delay = GATHER) => {
  const at = Math.max(performance.now() + delay, last + INTERVAL);
  if (at >= due) return;
  clearTimeout(timer);
  due = at;
  timer = setTimeout(refreshParts, at - performance.now());
};

// Whether htmx has sent the request: it does so at once, unless it has not prepared the part or the part already loads.
const start = (part) => {
  window.htmx?.trigger(part, "fp8:refresh");
  return loading.has(part);
};

const refreshParts = () => {
  due = Infinity;
  const now = performance.now();
  for (const part of document.querySelectorAll("[data-refresh-on]")) {
    // The end of its request, of that which replaces it, or of its use looks again.
    if (!isOutOfDate(part) || loading.has(part) || isInUse(part) || isReplaced(part)) continue;
    const wait = (notBefore.get(part.id) ?? 0) - now;
    if (wait > 0) look(wait);
    else if (start(part)) last = now;
    else look(NOT_STARTED);
  }
};

// Note that there were changes of this kind; without one, that there may have been any.
export const noteChange = (kind = ALL) => {
  changedAt.set(kind, performance.now());
  look();
};

document.addEventListener("htmx:beforeRequest", ({ target, detail }) => {
  startOf.set(detail.requestConfig, performance.now());
  if (isPart(target) && isRefresh(detail)) loading.set(target, detail.requestConfig);
});

document.addEventListener("htmx:beforeSwap", ({ detail }) => {
  if (isRefresh(detail) && isReplaced(detail.target)) detail.shouldSwap = false;
});

const hasFailed = ({ status }) => status === 0 || status === 429 || status >= 500;

document.addEventListener("htmx:afterRequest", ({ detail }) => {
  const { elt: part } = detail.requestConfig;
  if (loading.get(part) === detail.requestConfig) {
    loading.delete(part);
    const begun = startOf.get(detail.requestConfig);
    const now = performance.now();
    const least = 1000 * Number(part.dataset.refreshSeconds ?? 0);
    notBefore.set(part.id, Math.max(begun + least, now + Math.min(MAX_PAUSE, 2 * (now - begun))));
    if (hasFailed(detail.xhr)) notBefore.set(part.id, now + AFTER_FAILURE);
    // What cannot be fetched (its run was deleted) is not asked for again until the next change.
    else if (detail.shouldSwap !== false) requestedAt.set(part, begun);
  }
  look();
});

// The parts in a new content are as old as its request.
document.addEventListener("htmx:afterSettle", ({ target, detail }) => {
  const begun = startOf.get(detail.requestConfig);
  if (begun === undefined) return;
  if (isPart(target)) requestedAt.set(target, begun);
  for (const part of target.querySelectorAll("[data-refresh-on]")) if (!requestedAt.has(part)) requestedAt.set(part, begun);
  look();
});

// Parts that were in use.
for (const kind of ["toggle", "focusout", "change"]) document.addEventListener(kind, () => look(), true);
