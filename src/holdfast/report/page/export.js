"use strict";
// Saves the numbers of the page: the texts that `holdfast report` writes, which the page carries compressed.
(() => {
  const group = document.querySelector(".export");
  const saved = JSON.parse(document.getElementById("figures").textContent).export;
  if (!group || !saved || !("DecompressionStream" in window)) return;

  async function texts() {
    const bytes = Uint8Array.from(atob(saved.packed), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  }

  // The records of the CSV as JSON: every field is a text, but for the numbers, which may be missing.
  function asJson(csv) {
    const numbers = new Set(["line", "value", "low", "high"]);
    const lines = [[]];
    for (const [, field, end] of csv.matchAll(/("(?:[^"]|"")*"|[^,\n]*)(,|\n)/g)) {
      lines.at(-1).push(field.startsWith('"') ? field.slice(1, -1).replaceAll('""', '"') : field);
      if (end === "\n") lines.push([]);
    }
    const [names, ...rows] = lines.slice(0, -1);
    const typed = (name, text) => (!numbers.has(name) ? text : text === "" ? null : Number(text));
    const records = rows.map((row) => Object.fromEntries(names.map((name, at) => [name, typed(name, row[at])])));
    return JSON.stringify({ schema: saved.schema, records });
  }

  async function save(form) {
    const { csv, tex } = await texts();
    const blob = new Blob([form === "json" ? asJson(csv) : { csv, tex }[form]], { type: "text/plain;charset=utf-8" });
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = `${saved.name}.${form}`;
    link.click();
    URL.revokeObjectURL(link.href);
  }

  for (const button of group.querySelectorAll("button")) button.addEventListener("click", () => save(button.dataset.form));
  group.hidden = false;
})();
