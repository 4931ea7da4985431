// Dead letters by type and error, and their replay together: first counted, then confirmed.

import { useRef, useState } from "preact/hooks";
import { post } from "../api.js";
import { count, visible, visibleLines } from "../format.js";
import { Act, Dialog, Failure, Loaded, Said, When, html, useAct, useData } from "../parts.js";
import { address } from "../route.js";

export function Dead({ overview }) {
  // A delivery that is dead when the feed first reports it no longer changes.
  const dead = useData("api/dead", { kinds: ["delivery", "changed"], about: ({ kind, event }) => kind === "changed" || event.state === "dead" });
  const [chosen, setChosen] = useState(null);
  const [said, say] = useState("");
  return html`<h1>Dead letters</h1>
    <${Said} text=${said} />
    <${Loaded} of=${dead}>${(data) => data.groups.length === 0 ? html`<p class="empty">There are no dead letters.</p>` : html`
      <p class="faint">${count(data.counted)} dead letters${data.more ? ", the newest ones; there are more" : ""}.${" "}
        <button type="button" disabled=${overview?.read_only} onClick=${() => setChosen({})}>Replay all…</button></p>
      <div class="wide"><table class="plain"><thead><tr><th scope="col">Type</th><th scope="col">Error</th><th scope="col" class="number">Number</th><th scope="col">Newest</th><th scope="col"><span class="hidden">Action</span></th></tr></thead>
        <tbody>${data.groups.map((group) => html`<tr key=${`${group.source ?? ""}\n${group.type}\n${group.error}`}>
          <td class="type"><a href=${address("deliveries", null, { type: group.type, state: "dead", ...(group.source ? { source: group.source } : {}) })}>${visible(group.type)}</a>${group.source && html`<span class="faint"> of ${group.source}</span>`}</td>
          <td><pre class="error">${visibleLines(group.error)}</pre><a href=${address("deliveries", group.sample_key)}>one of them</a></td>
          <td class="number">${count(group.count)}</td><td><${When} at=${group.newest_at} /></td>
          <td><button type="button" disabled=${overview?.read_only} onClick=${() => setChosen({ type: group.type, error: group.error, ...(group.source ? { source: group.source } : {}) })}>Replay…</button></td></tr>`)}</tbody></table></div>`}<//>
    ${chosen && html`<${Bulk} choice=${chosen} onClose=${(text) => { setChosen(null); if (text) { say(text); dead.again(); } }} />`}`;
}

// The program counts the matching dead letters and returns a confirmation for exactly these, not
// for later ones. It replays a thousand at a time: a person may stop in between, or continue after
// an error.
function Bulk({ choice, onClose }) {
  const [trial, setTrial] = useState(null);
  const [error, setError] = useState(null);
  const [done, setDone] = useState(0);
  const next = useRef({ state: "dead", ...choice });
  const replayed = useRef(0);
  const stopped = useRef(false);
  const tried = trial !== null;
  const end = (gone = 0) => onClose(replayed.current || gone ? [`${count(replayed.current)} deliveries are in the queue again.`,
    gone && `Left out, because they are no longer dead letters: ${count(gone)} of ${count(trial.count)}.`, trial.more && "There are more."].filter(Boolean).join(" ") : "");
  const [act, acting] = useAct(async () => {
    if (trial?.count === 0) return;
    setError(null);
    try {
      if (!tried) {
        let counted;
        for (let more = true; more && !stopped.current;) {
          counted = await post("api/events/replay", { ...next.current, dry_run: true });
          more = counted.more && !counted.count;
          if (more) next.current.after = counted.after;
        }
        if (stopped.current) return end();
        next.current.confirm = counted.confirm;
        setTrial(counted);
        return;
      }
      for (let more = true; more && !stopped.current;) {
        const answer = await post("api/events/replay", next.current);
        replayed.current += answer.replayed;
        setDone(replayed.current);
        more = answer.more && answer.after !== null && answer.after !== next.current.after;
        if (more) next.current = { ...next.current, after: answer.after };
      }
      end(stopped.current ? 0 : trial.count - replayed.current);
    } catch (failure) {
      if (stopped.current) end();
      setError(failure);
    }
  });
  const leave = () => {
    stopped.current = true;
    if (!acting) end();
  };
  return html`<${Dialog} title="Replay dead letters" onClose=${leave}>
    <dl class="facts"><div><dt>Type</dt><dd>${visible(choice.type) ?? "every type"}</dd></div><div><dt>Error</dt><dd>${visibleLines(choice.error) ?? "every error"}</dd></div></dl>
    ${error && html`<${Failure} error=${error} />`}
    ${tried ? html`<p><b class="count">${count(trial.count)}</b> deliveries would run again.${trial.more && " There are more, for another time."}</p>
      <ul class="sample">${trial.events.slice(0, 5).map((event) => html`<li class="mono">${event.webhook_id}</li>`)}${trial.count > 5 && html`<li class="faint">and others</li>`}</ul>` : html`<p>A dry run counts them and changes nothing.</p>`}
    <p role="status" class="said">${done > 0 && `${count(done)} put back so far.`}</p>
    <p class="buttons"><button type="button" onClick=${leave}>${tried && (acting || done) ? "Stop" : "Cancel"}</button>
      <${Act} type="button" busy=${acting || trial?.count === 0} onClick=${act}>${!tried ? "Dry run" : done ? "Go on" : `Replay ${count(trial.count)}`}<//></p><//>`;
}
