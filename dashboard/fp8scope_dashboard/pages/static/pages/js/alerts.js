// New alerts: messages on open pages, and notifications of the browser if somebody asked for them.

const body = document.body;
const container = document.querySelector("[data-toasts]");
const KEY = "fp8scope-notify";
const SHOWN_MILLISECONDS = 15000;
const POLL_MILLISECONDS = 60000;

const remembered = () => {
  try { return localStorage.getItem(KEY) === "on"; } catch { return false; }
};
const remember = (on) => {
  try { localStorage.setItem(KEY, on ? "on" : "off"); } catch { /* private window: until the page is left */ }
};

// The number beside "Alerts" in the header.
const showCount = (open) => {
  const place = document.getElementById("alert-count");
  const number = document.createElement("span");
  number.className = "count";
  number.setAttribute("aria-hidden", "true");
  number.textContent = open > 99 ? "99+" : open;
  const words = document.createElement("span");
  words.className = "sr-only";
  words.textContent = `, ${open} open`;
  place?.replaceChildren(...(open ? [number, words] : []));
};

// Asks for the alerts after the last one that this tab has seen.
class Watch {
  constructor() {
    this.newest = Number(body.dataset.newestAlert || 0);
    this.asking = false;
    this.again = false;
  }

  async fresh() {
    const answer = await fetch(`${body.dataset.alerts}?after=${this.newest}`, { headers: { Accept: "application/json" } });
    if (!answer.ok || answer.redirected) return [];
    const { newest, alerts, more, open } = await answer.json();
    showCount(open);
    this.newest = Math.max(this.newest, newest);
    if (more) alerts.push({ number: 0, severity: "warning", title: `${more} more alerts`, run: "", message: "", url: body.dataset.alerts.replace("recent.json", "") });
    return alerts;
  }

  // Two changes at once are asked for one after the other, so that none is shown twice.
  async each(show) {
    if (this.asking) { this.again = true; return; }
    this.asking = true;
    try {
      do {
        this.again = false;
        (await this.fresh()).reverse().forEach(show);
      } while (this.again);
    } catch { /* The server is away: the next change asks again. */ } finally { this.asking = false; }
  }
}

const toast = (alert) => {
  const element = document.createElement("article");
  element.className = `toast toast--${alert.severity}`;
  const link = document.createElement("a");
  link.href = alert.url;
  link.textContent = alert.run ? `${alert.title} in ${alert.run}` : alert.title;
  const text = document.createElement("p");
  text.textContent = alert.message;
  const close = document.createElement("button");
  close.type = "button";
  close.className = "button button--bare button--small";
  close.setAttribute("aria-label", `Close: ${alert.title}`);
  close.textContent = "×";
  close.addEventListener("click", () => element.remove());
  element.append(link, close, text);
  container.append(element);
  // Critical alerts stay until they are closed.
  if (alert.severity === "critical") return;
  const hide = () => {
    if (element.matches(":hover, :focus-within")) setTimeout(hide, SHOWN_MILLISECONDS);
    else element.remove();
  };
  setTimeout(hide, SHOWN_MILLISECONDS);
};

if (container) {
  const pageWatch = new Watch();
  document.addEventListener("fp8:change", (event) => {
    if (event.detail.all || event.detail.kinds.has("alert")) pageWatch.each(toast);
  });
}

// One tab of the browser, whichever holds the lock, listens also while it is hidden.
const canNotify = "Notification" in window && "locks" in navigator && window.isSecureContext;

const notify = (alert) => {
  const title = alert.run ? `${alert.title} in ${alert.run}` : alert.title;
  // Tabs of the same project replace each other's notification of an alert instead of repeating it.
  const notification = new Notification(title, {
    body: alert.message, tag: `fp8scope-${alert.number}`, requireInteraction: alert.severity === "critical",
  });
  notification.addEventListener("click", () => { window.focus(); location.assign(alert.url); notification.close(); });
};

let isListening = false;
const listen = () => {
  if (isListening || !canNotify || !remembered() || Notification.permission !== "granted" || !body.dataset.alerts) return;
  isListening = true;
  navigator.locks.request(`fp8scope-notify-${body.dataset.alerts}`, () => new Promise((release) => {
    const watch = new Watch();
    const stream = new EventSource(body.dataset.alerts.replace(/alerts\/recent\.json$/, "events"));
    let timer = null;
    const look = () => {
      if (remembered()) { watch.each(notify); return; }
      stream.close();
      clearInterval(timer);
      isListening = false;
      release();
    };
    stream.addEventListener("ready", look);
    stream.addEventListener("change", (event) => { if (JSON.parse(event.data).kind === "alert") look(); });
    // Without a stream the browser tries again; look from time to time all the same.
    timer = setInterval(look, POLL_MILLISECONDS);
  }));
};

const button = document.querySelector("[data-notify]");
if (button && canNotify) {
  const label = button.querySelector("[data-label]");
  const show = () => {
    const isOn = remembered() && Notification.permission === "granted";
    button.setAttribute("aria-pressed", String(isOn));
    label.textContent = isOn ? "Notifications are on" : "Notify me in this browser";
    if (Notification.permission === "denied") label.textContent = "Notifications are blocked in the browser’s settings";
  };
  button.hidden = false;
  show();
  button.addEventListener("click", async () => {
    const wasOn = remembered() && Notification.permission === "granted";
    // Browsers ask the person only here, on a click.
    if (!wasOn && Notification.permission === "default") await Notification.requestPermission();
    remember(!wasOn && Notification.permission === "granted");
    show();
    listen();
  });
}
listen();

// The boxes of the list, the box that selects all of them, and the bar that says how many are selected.
const boxes = () => [...document.querySelectorAll('#alerts [type=checkbox][name="alerts"]')];
const showChosen = () => {
  const label = document.querySelector("[data-chosen]");
  if (!label) return;
  const chosen = boxes().filter((box) => box.checked).length;
  label.textContent = `${chosen} selected`;
  const all = document.querySelector("[data-choose-all]");
  all.checked = chosen === boxes().length;
  all.indeterminate = chosen > 0 && !all.checked;
};
document.addEventListener("change", (event) => {
  if (!event.target.matches?.('#alerts [type=checkbox]')) return;
  if (event.target.matches("[data-choose-all]")) for (const box of boxes()) box.checked = event.target.checked;
  showChosen();
});
document.addEventListener("click", (event) => {
  if (!event.target.closest?.("[data-clear-chosen]")) return;
  event.preventDefault();
  for (const box of boxes()) box.checked = false;
  showChosen();
});

// The time until which an alert is muted is one of the person's time zone. A refresh replaces the form's fields.
document.addEventListener("submit", (event) => {
  const zone = event.target.querySelector?.("[data-browser-zone]");
  if (zone) zone.value = Intl.DateTimeFormat().resolvedOptions().timeZone || "UTC";
}, true);

// A new rule's quiet hours are those of the person's time zone.
const zone = document.querySelector("[data-time-zone]");
if (zone && zone.value === "UTC" && !document.querySelector('input[name="quiet"]')?.checked) {
  zone.value = Intl.DateTimeFormat().resolvedOptions().timeZone || "UTC";
}
