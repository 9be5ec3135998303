// Opens a tensor beside the page of its run, in a dialog. The address names the tensor, so that the view can be
// shared and the back button closes the dialog.

import { explainFailures, loadInto } from "./try_again.js";

const dialog = () => document.getElementById("tensor-drawer");

// A tensor is named by its index or by its name.
const addressWith = (tensor) => {
  const url = new URL(location.href);
  if (tensor === null) url.searchParams.delete("tensor");
  else url.searchParams.set("tensor", tensor);
  return url;
};

const show = (tensor) => {
  const drawer = dialog();
  const body = drawer.querySelector("[data-drawer-body]");
  // Not data-tensor: a click on that opens a tensor.
  drawer.dataset.shown = tensor;
  body.replaceChildren(Object.assign(document.createElement("p"), { className: "muted", textContent: "Loading…" }));
  if (!drawer.open) drawer.showModal();
  const query = new URLSearchParams({ tensor, drawer: "1" });
  loadInto(body, `${drawer.dataset.address}?${query}`, drawer);
};

export const openDrawer = (tensor) => {
  if (!dialog()) return;
  // A second tensor replaces the first, so that one step back closes the dialog.
  const change = dialog().open ? "replaceState" : "pushState";
  history[change]({ ...history.state, tensorDrawer: true }, "", addressWith(tensor));
  show(String(tensor));
};

const close = () => {
  const drawer = dialog();
  if (drawer?.open) drawer.close();
};

const start = () => {
  const drawer = dialog();
  if (!drawer || drawer.started) return;
  drawer.started = true;
  const body = drawer.querySelector("[data-drawer-body]");
  explainFailures(body, "the tensor", () => show(drawer.dataset.shown));
  drawer.addEventListener("close", () => {
    delete drawer.dataset.shown;
    drawer.querySelector("[data-drawer-body]").replaceChildren();
    if (!new URL(location.href).searchParams.has("tensor")) return;
    if (history.state?.tensorDrawer) history.back();
    else history.replaceState(history.state, "", addressWith(null));
  });
  drawer.addEventListener("click", (event) => {
    // The backdrop belongs to the dialog.
    if (event.target === drawer || event.target.closest("[data-drawer-close]")) close();
  });
  if (drawer.dataset.chosen) show(drawer.dataset.chosen);
};

addEventListener("popstate", () => {
  const tensor = new URL(location.href).searchParams.get("tensor");
  if (tensor === null) close();
  else if (dialog() && dialog().dataset.shown !== tensor) show(tensor);
});

document.addEventListener("click", (event) => {
  const link = event.target.closest("[data-tensor]");
  if (!link || !dialog() || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
  event.preventDefault();
  openDrawer(link.dataset.tensor);
});
// The tabs of a run replace each other.
document.addEventListener("htmx:afterSettle", start);
start();
