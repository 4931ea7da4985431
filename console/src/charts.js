// Small charts of the last minutes. uPlot draws on a canvas and sets its size by style properties,
// which the Content-Security-Policy allows.

import uPlot from "uplot";
import { useEffect, useRef } from "preact/hooks";
import { html } from "./parts.js";

const HEIGHT = 130;
const SECONDS = 15 * 60;

// A property holds the colours of both modes; the canvas gets the current one.
function colour(element, name) {
  element.style.color = `var(${name})`;
  return getComputedStyle(element).color;
}

// `lines`: [label, custom property of its colour, values]; `at`: Unix seconds.
export function Chart({ title, at, lines, shown }) {
  const place = useRef(null);
  const plot = useRef(null);
  const data = [at, ...lines.map(([, , values]) => values)];
  const latest = useRef(data);
  latest.current = data;
  useEffect(() => {
    const draw = () => {
      plot.current?.destroy();
      const now = (name) => colour(place.current, name);
      const grid = { stroke: now("--line"), width: 1 };
      const axis = { stroke: now("--faint"), grid, ticks: grid, font: "11px system-ui, sans-serif" };
      plot.current = new uPlot({
        width: Math.max(place.current.clientWidth, 120),
        height: HEIGHT,
        legend: { show: false },
        cursor: { show: false },
        padding: [8, 4, 0, 0],
        scales: { x: { range: quarter }, y: { range: (_, least, most) => [0, most > 0 ? most * 1.15 : 1] } },
        axes: [{ ...axis, size: 28, space: 70, values: (_, splits) => splits.map(minute) },
          { ...axis, size: 62, space: 32, values: (_, splits) => splits.map((value) => (shown ? shown(value) : value)) }],
        series: [{}, ...lines.map(([label, property]) => ({
          label, stroke: now(property), width: 1.5, spanGaps: true,
          // A value without a neighbour has no line, so it is drawn as a point.
          points: { show: (plot, index) => plot.data[index].filter((value) => value != null).length < 3, size: 5 } }))],
      }, latest.current, place.current);
    };
    draw();
    const sized = new ResizeObserver(() => place.current && plot.current?.setSize({ width: Math.max(place.current.clientWidth, 120), height: HEIGHT }));
    sized.observe(place.current);
    addEventListener("sdk-theme", draw);
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    scheme.addEventListener("change", draw);
    return () => {
      sized.disconnect();
      removeEventListener("sdk-theme", draw);
      scheme.removeEventListener("change", draw);
      plot.current?.destroy();
    };
  }, []);
  useEffect(() => plot.current?.setData(data), [data]);
  const said = lines.map(([label, , values]) => {
    const value = values.findLast((each) => each != null);
    return `${label} ${value == null ? "-" : shown ? shown(value) : Math.round(value * 100) / 100}`;
  });
  return html`<figure class="chart">
    <figcaption>${title}<span class="legend">${lines.map(([label, property]) => html`<span><i class="dot ${property.slice(2)}"></i>${label}</span>`)}</span></figcaption>
    <div ref=${place} role="img" aria-label="${title}: ${said.join(", ")}"></div></figure>`;
}

// For a single point the library would choose a scale of a day, and for none no scale.
function quarter({ data }) {
  const end = data[0].at(-1) ?? Date.now() / 1000;
  return [end - SECONDS, end];
}

const minute = (seconds) => {
  const moment = new Date(seconds * 1000);
  return `${String(moment.getHours()).padStart(2, "0")}:${String(moment.getMinutes()).padStart(2, "0")}`;
};
