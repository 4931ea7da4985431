// Writes what the package ships: one script, one style sheet, the page, and the licences of what is
// bundled. The same sources give the same bytes: nothing of the time or the machine goes in.
import { build } from "esbuild";
import { copyFileSync, mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const target = process.argv[2] ?? join(here, "..", "sdk_trio", "admin", "static");
mkdirSync(target, { recursive: true });

await build({
  entryPoints: [join(here, "src", "console.js"), join(here, "src", "console.css")],
  outdir: target,
  bundle: true,
  minify: true,
  format: "esm",
  target: ["es2022"],
  charset: "utf8",
  legalComments: "none",
  logLevel: "warning",
});
copyFileSync(join(here, "src", "index.html"), join(target, "index.html"));

const { dependencies } = JSON.parse(readFileSync(join(here, "package.json")));
const licences = Object.keys(dependencies).sort().map((name) => {
  const folder = join(here, "node_modules", name);
  const { version, license } = JSON.parse(readFileSync(join(folder, "package.json")));
  const text = readFileSync(join(folder, "LICENSE"), "utf8").trim();
  return `${name} ${version} (${license})\n\n${text}\n`;
});
writeFileSync(join(target, "licences.txt"), licences.join(`\n${"-".repeat(78)}\n\n`));
