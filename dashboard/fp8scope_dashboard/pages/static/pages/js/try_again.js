// What htmx cannot load is said where it would be, with a button that tries again.

const REASONS = {
  "htmx:responseError": (event) => `the server answered ${event.detail.xhr.status}`,
  "htmx:sendError": () => "the server cannot be reached",
  "htmx:timeout": () => "the server did not answer in time",
};

// `name` is what the element shows, such as "the ranking". A page may have replaced the element.
export const explainFailures = (element, name, retry) => {
  for (const [kind, reason] of Object.entries(REASONS)) {
    document.addEventListener(kind, (event) => {
      if (event.detail.target !== element || !element.isConnected) return;
      const text = Object.assign(document.createElement("p"), { className: "muted", textContent: `Cannot load ${name}: ${reason(event)}.` });
      text.setAttribute("role", "status");
      const button = Object.assign(document.createElement("button"), { type: "button", className: "button button--small", textContent: "Try again" });
      button.addEventListener("click", retry);
      const message = Object.assign(document.createElement("div"), { className: "stack" });
      message.append(text, button);
      button.style.justifySelf = "start";
      element.replaceChildren(message);
    });
  }
};

// Its failures are explained by the events. With a source of its own it does not wait for other parts of the page.
export const loadInto = (element, address, source = element) => (
  window.htmx.ajax("GET", address, { source, target: element, swap: "innerHTML" }).catch(() => {})
);
