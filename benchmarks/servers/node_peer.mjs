// The same on Node.js: its own http server with the `standardwebhooks` package. Arguments: PORT and WORKERS.
import cluster from "node:cluster";
import http from "node:http";
import { Webhook } from "standardwebhooks";

const webhook = new Webhook(process.env.BENCHMARK_SECRET);
let paid = 0;
const handlers = {
  "order.paid": async (event) => {
    paid += event.data.total_amount;
  },
};

async function receive(request, response) {
  const chunks = [];
  for await (const chunk of request) chunks.push(chunk);
  let event;
  try {
    event = webhook.verify(Buffer.concat(chunks), request.headers);
  } catch {
    response.writeHead(400).end("{}");
    return;
  }
  await handlers[event.type](event);
  response.writeHead(200, { "content-type": "application/json", "content-length": 2 });
  response.end("{}");
}

const workers = Number(process.argv[3]);
if (cluster.isPrimary && workers > 1) {
  for (let number = 0; number < workers; number++) cluster.fork();
  process.on("SIGTERM", () => {
    for (const worker of Object.values(cluster.workers)) worker.process.kill("SIGTERM");
  });
} else {
  const server = http.createServer(receive);
  server.keepAliveTimeout = 75_000;
  server.listen(Number(process.argv[2]), "127.0.0.1");
  process.on("SIGTERM", () => {
    server.close(() => process.exit(0));
    server.closeIdleConnections();
  });
}
