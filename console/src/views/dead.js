// Dead letters by type and error, put back together: first counted, then confirmed.

import { useState } from "preact/hooks";
import { post } from "../api.js";
import { count } from "../format.js";
import { Dialog, Failure, Loaded, When, html, useData } from "../parts.js";
import { address } from "../route.js";

export function Dead({ overview }) {
  const dead = useData("api/dead", { kinds: ["changed"] });
  const [chosen, setChosen] = useState(null);
  const [said, say] = useState("");
  return html`<h1>Dead letters</h1>
    <p role="status" class="said">${said}</p>
    <${Loaded} of=${dead}>${(data) => data.groups.length === 0 ? html`<p class="empty">There are no dead letters.</p>` : html`
      <p class="faint">${count(data.counted)} dead letters${data.more ? ", the newest ones; there are more" : ""}.${" "}
        <button type="button" disabled=${overview?.read_only} onClick=${() => setChosen({})}>Replay all…</button></p>
      <div class="wide"><table class="plain"><thead><tr><th scope="col">Type</th><th scope="col">Error</th><th scope="col" class="number">Number</th><th scope="col">Newest</th><th scope="col"><span class="hidden">Action</span></th></tr></thead>
        <tbody>${data.groups.map((group) => html`<tr key=${`${group.type}\n${group.error}`}>
          <td class="type"><a href=${address("deliveries", null, { type: group.type, state: "dead" })}>${group.type}</a></td>
          <td><pre class="error">${group.error}</pre><a href=${address("deliveries", group.sample_key)}>one of them</a></td>
          <td class="number">${count(group.count)}</td><td><${When} at=${group.newest_at} /></td>
          <td><button type="button" disabled=${overview?.read_only} onClick=${() => setChosen({ type: group.type, error: group.error })}>Replay…</button></td></tr>`)}</tbody></table></div>`}<//>
    ${chosen && html`<${Bulk} choice=${chosen} onClose=${(text) => { setChosen(null); if (text) { say(text); dead.again(); } }} />`}`;
}

// The program counts what the choice fits and gives a confirmation for exactly that; it ends at what
// is dead by then, so nothing that dies meanwhile is put back unseen.
function Bulk({ choice, onClose }) {
  const [trial, setTrial] = useState(null);
  const [error, setError] = useState(null);
  const [done, setDone] = useState(null);
  const order = { state: "dead", ...choice };
  const tried = trial !== null;
  const look = async () => {
    setError(null);
    try {
      setTrial(await post("api/events/replay", { ...order, dry_run: true }));
    } catch (failure) {
      setError(failure);
    }
  };
  const act = async () => {
    setError(null);
    try {
      let [replayed, after, more, confirm] = [0, trial.after, true, trial.confirm];
      let next = { ...order, confirm };
      while (more) {
        const answer = await post("api/events/replay", next);
        replayed += answer.replayed;
        setDone(replayed);
        more = answer.more && answer.after !== null && answer.after !== next.after;
        next = { ...order, after: answer.after, confirm: answer.confirm ?? confirm };
      }
      onClose(`${count(replayed)} deliveries are in the queue again.`);
    } catch (failure) {
      setError(failure);
    }
  };
  return html`<${Dialog} title="Replay dead letters" onClose=${() => onClose("")}>
    <dl class="facts"><div><dt>Type</dt><dd>${choice.type ?? "every type"}</dd></div><div><dt>Error</dt><dd>${choice.error ?? "every error"}</dd></div></dl>
    ${error && html`<${Failure} error=${error} />`}
    ${tried ? html`<p><b class="count">${count(trial.count)}</b> deliveries would run again.</p>
      <ul class="sample">${trial.events.slice(0, 5).map((event) => html`<li class="mono">${event.webhook_id}</li>`)}${trial.count > 5 && html`<li class="faint">and others</li>`}</ul>` : html`<p>A dry run counts them and changes nothing.</p>`}
    ${done !== null && html`<p role="status">${count(done)} put back so far.</p>`}
    <p class="buttons"><button type="button" onClick=${() => onClose("")}>Cancel</button>
      ${tried ? html`<button type="button" class="strong" disabled=${trial.count === 0 || done !== null} onClick=${act}>Replay ${count(trial.count)}</button>` : html`<button type="button" class="strong" onClick=${look}>Dry run</button>`}</p><//>`;
}
