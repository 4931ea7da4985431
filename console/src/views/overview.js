// Are payments processed, and if not, where do they wait?

import { Chart } from "../charts.js";
import { ago, count, span } from "../format.js";
import { Loaded, html, useData } from "../parts.js";
import { address } from "../route.js";

const STATES = ["received", "running", "retrying", "done", "dead", "parked"];

export function Overview() {
  const overview = useData("api/overview", { every: 2000 });
  return html`<h1>Overview</h1><${Loaded} of=${overview}>${(data) => html`<${Figures} ...${data} />`}<//>`;
}

function Figures(of) {
  const points = of.series.points;
  const at = points.map((point) => point.at);
  const rate = (...names) => points.map((point) => names.reduce((sum, name) => sum + point[name], 0) / of.series.step_seconds);
  const failing = of.checks.filter((check) => !check.ok || check.degraded);
  const dead = of.events?.dead ?? 0;
  // Probes answer ok for a receiver that accepts deliveries; a person still has to handle dead
  // letters.
  const [value, tone] = of.status === "ok" && dead > 0 ? [`ok, ${count(dead)} dead`, "degraded"] : [of.status, of.status];
  return html`
    <div class="cards">
      <${Card} title="State" value=${value} tone=${tone} note=${`${of.state}, up ${span(of.uptime_seconds)}`} />
      <${Card} title="Queue" value=${`${count(of.queue.depth)} of ${count(of.queue.capacity)}`} note=${of.queue.oldest_seconds ? `oldest waits ${span(of.queue.oldest_seconds)}` : "nothing waits"} />
      ${of.circuit && html`<${Card} title="Circuit to the upstream" value=${of.circuit} tone=${of.circuit === "closed" ? "ok" : "failing"} />`}
      ${of.replication_lag_seconds != null && html`<${Card} title="Replication lag" value=${span(of.replication_lag_seconds)} />`}
      ${of.tenants && html`<${Card} title="Tenants" value=${count(Object.values(of.tenants).reduce((sum, each) => sum + each, 0))} note=${Object.entries(of.tenants).map(([status, number]) => `${number} ${status.toLowerCase()}`).join(", ")} />`}
    </div>
    ${of.events && html`<ul class="states" aria-label="Deliveries by state">${STATES.map((state) => html`
      <li><a href=${address("deliveries", null, { state })}><span class="state state-${state}">${state}</span><b>${count(of.events[state] ?? 0)}</b></a></li>`)}</ul>`}
    ${(failing.length > 0 || dead > 0) && html`<section><h2>Needs attention</h2><ul class="findings">${failing.map((check) => html`
      <li class=${check.ok ? "warning" : "problem"}><b>${check.name}</b> ${check.detail ?? (check.ok ? "degraded" : "failing")}</li>`)}
      ${dead > 0 && html`<li class="warning"><b>dead letters</b> <a href=${address("dead")}>${count(dead)} deliveries were given up</a></li>`}</ul></section>`}
    <section class="charts" aria-label="The last quarter of an hour">
      <${Chart} title="Deliveries a second" at=${at} lines=${[["accepted", "--good", rate("accepted", "handled")], ["failed", "--bad", rate("failed", "dead", "unavailable")], ["rejected", "--warn", rate("rejected", "refused")]]} />
      <${Chart} title="Run of a handler" at=${at} shown=${span} lines=${[["median", "--accent", points.map((point) => point.p50_seconds)], ["95 %", "--warn", points.map((point) => point.p95_seconds)]]} />
      <${Chart} title="Waiting in the queue" at=${at} lines=${[["events", "--accent", points.map((point) => point.queue_depth)]]} />
    </section>
    <p class="faint">Version ${of.version}, started ${ago(of.started_at)}.</p>`;
}

const Card = ({ title, value, note, tone = "" }) => html`
  <div class="card ${tone}"><h2>${title}</h2><p class="figure">${value}</p>${note && html`<p class="faint">${note}</p>`}</div>`;
