// The charts of settings and results: a click on a point opens its run, and ticked settings become axes.

const join = (form) => {
  const field = form.querySelector("[data-joined]");
  if (field) field.value = [...form.querySelectorAll("[data-join]:checked")].map((box) => box.value).join(",");
};

for (const form of document.querySelectorAll("form[data-controls]")) join(form);
// Before the chart reads the fields of its form.
document.addEventListener("change", (event) => { if (event.target.matches?.("[data-join]")) join(event.target.form); }, true);

document.addEventListener("fp8:point", ({ detail }) => {
  const address = detail.point.customdata;
  if (typeof address === "string" && address.startsWith("/")) location.assign(address);
});
