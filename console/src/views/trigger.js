// In Development: trigger a sample event of any type, with chosen data.

import { useState } from "preact/hooks";
import { postText } from "../api.js";
import { Failure, Loaded, html, useAct, useData } from "../parts.js";
import { address } from "../route.js";

export function Trigger({ overview }) {
  const types = useData("api/types");
  return html`<h1>Trigger</h1><p class="faint">A signed sample goes over the network to this receiver, through every check.</p>
    <${Loaded} of=${types}>${(rows) => html`<${Form} types=${rows.filter((each) => !each.source)} readOnly=${overview?.read_only} />`}<//>`;
}

function Form({ types, readOnly }) {
  const first = types.find((each) => each.handled) ?? types[0];
  const [type, setType] = useState(first.type);
  const [text, setText] = useState(JSON.stringify(first.sample ?? {}, null, 2));
  const [answer, setAnswer] = useState(null);
  const [error, setError] = useState(null);
  const choose = (name) => {
    setType(name);
    setText(JSON.stringify(types.find((each) => each.type === name)?.sample ?? {}, null, 2));
  };
  const [send, sending] = useAct(async () => {
    setError(null);
    setAnswer(null);
    try {
      JSON.parse(text);
    } catch (failure) {
      setError(new Error(`The data are no JSON: ${failure.message}`));
      return;
    }
    try {
      // Sent exactly as typed: as a JavaScript number, 12345678901234567890 would change.
      setAnswer(await postText("api/events/trigger", `{"type": ${JSON.stringify(type)}, "data": ${text}}`));
    } catch (failure) {
      setError(failure);
    }
  });
  return html`<form class="trigger" onSubmit=${send}>
    <label class="field">Type<select name="type" value=${type} onChange=${(event) => choose(event.currentTarget.value)}>
      ${types.map((each) => html`<option value=${each.type} selected=${each.type === type}>${each.type}${each.handled ? "" : " (no handler)"}</option>`)}</select></label>
    <label class="field wide">Data<textarea name="data" rows="16" spellcheck=${false} class="mono" value=${text} onInput=${(event) => setText(event.currentTarget.value)}></textarea></label>
    <p class="buttons"><button class="strong" disabled=${readOnly || sending}>Send</button></p>
    ${error && html`<${Failure} error=${error} />`}
    ${answer && html`<p role="status"><b>${answer.status}</b> ${answer.body} <a href=${address("deliveries", answer.webhook_id)}>${answer.webhook_id}</a></p>`}</form>`;
}
