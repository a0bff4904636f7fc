// Many people, each with the client that browsers run and, as in a browser, with the
// modules of a document of their own.
//
//   node --experimental-websocket crowd.js PAGE SERVER
//
// It prints a JSON line whenever anybody is told another count, and whenever the number
// of those who are connected changes.
import { Worker, isMainThread, parentPort, workerData } from 'node:worker_threads';

const PEOPLE = 50;

if (isMainThread) {
  const [page, server] = process.argv.slice(2);
  const say = (what) => process.stdout.write(`${JSON.stringify({ at: Date.now(), ...what })}\n`);
  let open = 0;
  let told = '';
  for (let i = 0; i < PEOPLE; i++)
    new Worker(new URL(import.meta.url), { workerData: { page, server } }).on('message', (what) => {
      if ('open' in what) say({ open: (open += what.open) });
      else if (told !== (told = JSON.stringify(what))) say(what);
    });
} else {
  globalThis.location = new URL('https://site.example/');
  const { Headcount } = await import('../headcount.js');
  const one = new Headcount(workerData.server, { share: false, storage: 'none' });
  let open = false;
  one.addEventListener('state', ({ detail }) => {
    if (open !== (open = detail === 'open')) parentPort.postMessage({ open: open ? 1 : -1 });
  });
  one.watch([workerData.page], ({ count, stale = false }) => parentPort.postMessage({ count, stale }));
  one.join(workerData.page);
}
