"use strict";
const root = document.body.dataset.root;
const problem = document.getElementById("problem");

function complain(text) {
  problem.textContent = text;
  problem.hidden = false;
}

async function post(address, body) {
  problem.hidden = true;
  let told;
  try {
    const answer = await fetch(address, { method: "POST", body });
    told = await answer.json();
  } catch {
    told = { error: "Mooring does not answer; is `mooring app` still running?" };
  }
  if (told.error) complain(told.error);
  return told;
}

const drop = document.getElementById("drop");
if (drop) {
  const file = document.getElementById("file");
  const busy = document.getElementById("busy");
  const give = async (table) => {
    if (!table) return;
    busy.hidden = false;
    const told = await post(root + "tables?name=" + encodeURIComponent(table.name), table);
    busy.hidden = true;
    file.value = "";
    if (told.next) location.assign(root + told.next);
  };
  file.addEventListener("change", () => give(file.files[0]));
  for (const kind of ["dragover", "dragleave", "drop"]) {
    addEventListener(kind, (event) => {
      event.preventDefault();
      drop.classList.toggle("over", kind === "dragover");
      if (kind === "drop") give(event.dataTransfer.files[0]);
    });
  }
}

const columns = document.getElementById("columns");
if (columns) columns.addEventListener("change", () => columns.submit());

const advise = document.getElementById("advise");
if (advise) {
  advise.addEventListener("click", async () => {
    advise.disabled = true;
    const { client, target, small } = advise.dataset;
    const asked = JSON.stringify({ client, target, drop_small: small === "true" });
    const told = await post(location.pathname + "/advise", asked);
    if (told.next) location.assign(told.next);
    else advise.disabled = false;
  });
}

const progress = document.getElementById("progress");
if (progress && progress.dataset.state !== "failed") {
  const bar = document.getElementById("bar");
  const began = Date.now();
  const look = async () => {
    let told;
    try {
      told = await (await fetch(location.pathname + "/state")).json();
    } catch {
      return complain("Mooring does not answer; is `mooring app` still running?");
    }
    if (told.state === "done" || told.state === "failed") return location.reload();
    document.getElementById("what").textContent = told.what;
    if (told.steps) {
      bar.max = told.steps;
      bar.value = told.done;
    } else bar.removeAttribute("value");
    document.getElementById("time").textContent = `${Math.round((Date.now() - began) / 1000)} s`;
    setTimeout(look, 500);
  };
  look();
}
