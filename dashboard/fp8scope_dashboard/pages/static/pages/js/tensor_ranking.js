// The ranking of tensors: loaded when the first chart is drawn. Its own choices are in the address, and the form of the
// map gives the others.

import { firstChart } from "./first_chart.js";
import { explainFailures, loadInto } from "./try_again.js";

const CHOICES = ["sort", "limit", "limit_of", "page", "everything"];

const publish = (name, value) => document.dispatchEvent(new CustomEvent("fp8:view", { detail: { name, value } }));

export const startRanking = (ranking) => {
  const query = new URLSearchParams(new FormData(document.getElementById("tensor-form")));
  const own = new URLSearchParams(location.search);
  for (const name of CHOICES) if (own.has(`tensors.${name}`)) query.set(name, own.get(`tensors.${name}`));
  const load = () => loadInto(ranking, `${ranking.dataset.ranking}?${query}`, document.body);
  explainFailures(ranking, "the ranking", load);
  firstChart.then(() => {
    load();
    window.htmx.trigger("#changes", "fp8:refresh");
  });
  ranking.addEventListener("htmx:afterSettle", () => {
    const chosen = ranking.querySelector("[data-chosen]")?.dataset;
    // The answer says which choices are not the default.
    for (const name of CHOICES) publish(`tensors.${name}`, chosen?.[name] || null);
  });
};
