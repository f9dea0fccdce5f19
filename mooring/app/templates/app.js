"use strict";
const root = document.body.dataset.root;
const problem = document.getElementById("problem");

function complain(text) {
  problem.textContent = text;
  problem.hidden = false;
}

async function post(address, body) {
  problem.hidden = true;
  let reply;
  try {
    const answer = await fetch(address, { method: "POST", body });
    reply = await answer.json();
  } catch {
    reply = { error: "Mooring does not answer; is `mooring app` still running?" };
  }
  if (reply.error) complain(reply.error);
  return reply;
}

const drop = document.getElementById("drop");
if (drop) {
  const file = document.getElementById("file");
  const busy = document.getElementById("busy");
  const give = async (table) => {
    if (!table) return;
    busy.hidden = false;
    const reply = await post(root + "tables?name=" + encodeURIComponent(table.name), table);
    busy.hidden = true;
    file.value = "";
    if (reply.next) location.assign(root + reply.next);
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
if (columns) {
  columns.addEventListener("change", () => columns.submit());
  for (const box of document.querySelectorAll("input[form=columns]")) box.addEventListener("change", () => columns.submit());
}

for (const button of document.querySelectorAll("button[data-action]")) {
  button.addEventListener("click", async () => {
    const { run, action } = button.dataset;
    const name = action === "rename" ? prompt("New name of the run", run) : null;
    if (action === "rename" ? !name : !confirm(`Delete the run ${run}?`)) return;
    const reply = await post(`${root}runs/${encodeURIComponent(run)}/${action}`, JSON.stringify({ name }));
    if (reply.next) location.reload();
  });
}

const advise = document.getElementById("advise");
if (advise) {
  advise.addEventListener("click", async () => {
    advise.disabled = true;
    const reply = await post(location.pathname + "/advise", advise.dataset.options);
    if (reply.next) location.assign(reply.next);
    else advise.disabled = false;
  });
}

function enableWhenChosen(file, button) {
  file.addEventListener("change", () => { button.disabled = !file.files[0]; });
}

const predictButton = document.getElementById("predict-rows");
if (predictButton) {
  const rows = document.getElementById("rows");
  const predicted = document.getElementById("predicted");
  enableWhenChosen(rows, predictButton);
  predictButton.addEventListener("click", async () => {
    predictButton.disabled = true;
    const interval = document.getElementById("interval");
    const settings = new URLSearchParams({ name: rows.files[0].name, format: document.getElementById("format").value });
    if (interval && interval.checked) settings.set("interval", "on");
    const reply = await post(`${root}runs/${encodeURIComponent(predictButton.dataset.run)}/predict?${settings}`, rows.files[0]);
    predictButton.disabled = false;
    if (!reply.file) return;
    const line = document.createElement("p");
    const link = document.createElement("a");
    link.href = `${root}runs/${reply.file}`;
    link.download = reply.name;
    link.textContent = reply.name;
    line.append(link, ": " + reply.notes.join(" "));
    predicted.prepend(line);
    link.click();
  });
}

const addButton = document.getElementById("add-client");
if (addButton) {
  const joining = document.getElementById("joining");
  enableWhenChosen(joining, addButton);
  addButton.addEventListener("click", async () => {
    addButton.disabled = true;
    const settings = new URLSearchParams({ name: joining.files[0].name });
    const reply = await post(`${root}runs/${encodeURIComponent(addButton.dataset.run)}/join?${settings}`, joining.files[0]);
    if (reply.next) location.assign(reply.next);
    else addButton.disabled = false;
  });
}

const progress = document.getElementById("progress");
if (progress && progress.dataset.state !== "failed") {
  const bar = document.getElementById("bar");
  const began = Date.now();
  const look = async () => {
    let reply;
    try {
      reply = await (await fetch(location.pathname + "/state")).json();
    } catch {
      return complain("Mooring does not answer; is `mooring app` still running?");
    }
    if (reply.state === "done" || reply.state === "failed") return location.reload();
    document.getElementById("what").textContent = reply.what;
    if (reply.steps) {
      bar.max = reply.steps;
      bar.value = reply.done;
    } else bar.removeAttribute("value");
    document.getElementById("time").textContent = `${Math.round((Date.now() - began) / 1000)} s`;
    setTimeout(look, 500);
  };
  look();
}
