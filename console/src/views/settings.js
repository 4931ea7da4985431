// The settings of the program, the source of each value, and the findings of doctor.

import { useState } from "preact/hooks";
import { Field, Loaded, When, html, useData } from "../parts.js";

export function Settings() {
  const settings = useData("api/settings");
  const actions = useData("api/actions", { every: 10_000 });
  const [word, setWord] = useState("");
  const fits = (setting) => `${setting.key} ${setting.value} ${setting.origin}`.toLowerCase().includes(word.toLowerCase());
  return html`<h1>Settings</h1>
    <div class="filters"><${Field} label="Contains" name="word" value=${word} onChange=${setWord} /></div>
    <${Loaded} of=${settings}>${(rows) => html`<div class="wide"><table class="plain"><thead><tr><th scope="col">Key</th><th scope="col">Value</th><th scope="col">From</th></tr></thead>
      <tbody>${rows.filter(fits).map((each) => html`<tr key=${each.key}><th scope="row" class="mono name">${each.key}</th><td class="mono">${each.value}</td><td class="faint origin">${each.origin}</td></tr>`)}</tbody></table></div>`}<//>
    <section><h2>Actions since the start</h2><${Loaded} of=${actions} empty="No one has changed anything here.">${(rows) => html`<ol class="line">${rows.map((each) => html`
      <li><${When} at=${each.at} /> <b>${each.action}</b> by ${each.actor} from ${each.address ?? "this machine"}, ${each.count} ${each.ids.length > 0 && html`<span class="mono faint">${each.ids.slice(0, 3).join(", ")}</span>`}</li>`)}</ol>`}<//></section>`;
}

export function Doctor() {
  const findings = useData("api/doctor");
  return html`<header class="title"><h1>Doctor</h1><span class="actions"><button type="button" onClick=${findings.again}>Look again</button></span></header>
    <${Loaded} of=${findings} empty="Nothing was found.">${(rows) => html`<ul class="findings">${rows.map((each) => html`
      <li class=${each.level}><b>${each.check}</b>${each.where && html` <span class="mono">${each.where}</span>`}<p>${each.what}</p>${each.remedy && html`<p class="faint">${each.remedy}</p>`}</li>`)}</ul>`}<//>`;
}
