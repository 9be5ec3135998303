// Long lists of a form can be filtered; a changed choice of one is saved at once.

document.addEventListener("change", (event) => {
  if (event.target.matches("[data-submit]")) event.target.form.requestSubmit();
});

for (const field of document.querySelectorAll("[data-find-in]")) {
  const list = document.getElementById(field.dataset.findIn);
  field.addEventListener("input", () => {
    const wanted = field.value.trim().toLowerCase();
    for (const item of list.children) item.hidden = !item.textContent.toLowerCase().includes(wanted);
  });
}
