// The dialog that changes the colour of a run in the list.

const dialog = document.getElementById("colours");
let opener = null;

document.addEventListener("click", (event) => {
  const button = event.target.closest?.("[data-colour-of]");
  if (!button || !dialog) return;
  opener = button.dataset.colourOf;
  for (const choice of dialog.querySelectorAll("[name=colour]")) {
    choice.setAttribute("aria-pressed", String(choice.value === button.dataset.colour));
  }
  dialog.showModal();
});

dialog?.addEventListener("close", () => document.querySelector(`[data-colour-of="${opener}"]`)?.focus());

dialog?.querySelector("[data-colours]").addEventListener("submit", async (event) => {
  event.preventDefault();
  const form = event.target;
  const body = new FormData(form, event.submitter);
  const answer = await fetch(`${form.dataset.colours}runs/${opener}/colour`, { method: "POST", body, redirect: "manual" });
  if (answer.type !== "opaqueredirect" && !answer.ok) { form.submit(); return; }
  dialog.close();
  window.htmx.trigger(document.getElementById("runs"), "fp8:refresh");
  document.dispatchEvent(new CustomEvent("fp8:colours"));
});
