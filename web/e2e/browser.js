// What the tests in a real Chromium share: the browser, its windows, a customer's
// site, and proxies between browser and server.
import assert from 'node:assert/strict';
import { existsSync } from 'node:fs';
import { mkdir, writeFile } from 'node:fs/promises';
import { createServer, request as httpRequest } from 'node:http';
import { connect, createServer as createTCPServer } from 'node:net';
import { delimiter, join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';

const { chromium } = await import('playwright-core').catch((error) => {
  throw new Error(`run make setup: ${error.message}`);
});

/** How long a test waits for an event, in ms. Only a fault takes this long: a busy machine never does. */
export const TIMEOUT = 180_000;

/** The leave grace, in ms, of a server that is started with GRACE: a busy machine reloads a page within that time. */
export const LEAVE_GRACE = 6_000;
export const GRACE = ['--leave-grace', `${LEAVE_GRACE}ms`];

/** The browser that the environment names, else the first of the PATH. */
function browserPath() {
  if (process.env.CHROMIUM) return process.env.CHROMIUM;
  const names = ['chromium', 'chromium-browser', 'google-chrome', 'google-chrome-stable'];
  return names
    .flatMap((name) => process.env.PATH.split(delimiter).map((folder) => join(folder, name)))
    .find((path) => existsSync(path));
}

/** more: further arguments of the browser. */
export function launch(...more) {
  const executablePath = browserPath();
  assert.ok(
    executablePath && existsSync(executablePath),
    `there is no browser ${executablePath ?? 'on the PATH'}: run make setup, or name one in CHROMIUM`,
  );
  return chromium.launch({
    executablePath,
    timeout: TIMEOUT,
    ignoreDefaultArgs: ['--disable-back-forward-cache'], // people have it
    args: [
      '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run',
      '--disable-background-networking', '--disable-component-update', '--disable-sync', ...more,
    ],
  });
}

/** A browser of its own that keeps neither cookies nor storage, with a folder of its own. */
export async function launchBare(folder) {
  const preferences = { profile: { default_content_setting_values: { cookies: 2 } } }; // 2: blocked
  await mkdir(join(folder, 'Default'));
  await writeFile(join(folder, 'Default/Preferences'), JSON.stringify(preferences));
  return chromium.launchPersistentContext(folder, {
    executablePath: browserPath(),
    timeout: TIMEOUT,
    args: ['--no-sandbox', '--disable-gpu', '--no-first-run'],
  });
}

/** A window whose console errors are kept. */
export async function open(context, address, prepare = async () => {}) {
  context.setDefaultTimeout(TIMEOUT);
  const page = await context.newPage();
  page.complaints = [];
  page.on('console', (message) => {
    if (['error', 'warning'].includes(message.type())) page.complaints.push(message.text());
  });
  page.on('pageerror', (error) => page.complaints.push(String(error)));
  await prepare(page);
  await page.goto(address);
  return page;
}

export const shown = (page, id = 'count') => page.evaluate((id) => document.getElementById(id).count, id);

/** Waits until something is what it should be. */
export async function eventually(want, what, get) {
  const deadline = Date.now() + TIMEOUT;
  let got;
  do {
    got = await get();
    if (got === want) return;
    await sleep(25);
  } while (Date.now() < deadline);
  assert.fail(`${what}: ${got}, not ${want}, after ${TIMEOUT} ms`);
}

/** Runs body for all ways at once. The error has each way that failed, and where. */
export async function forAll(ways, body) {
  const ends = await Promise.allSettled(ways.map(body));
  const failed = ends.flatMap(({ reason }, i) => (reason ? [`${ways[i]}: ${reason.stack}`] : []));
  assert.ok(failed.length === 0, failed.join('\n'));
}

/**
 * Waits for something that the product promises within some ms. What the machine lost meanwhile, as late wake-ups show,
 * does not count: several times, since what is waited for crosses several processes.
 */
export async function within(promise, what, wait) {
  const NAP = 10;
  const HOPS = 3;
  const began = Date.now();
  let lost = 0;
  let slept = began;
  const naps = setInterval(() => {
    const now = Date.now();
    lost += Math.max(0, now - slept - NAP - 1);
    slept = now;
  }, NAP);
  try {
    await wait();
  } finally {
    clearInterval(naps);
  }
  const took = Date.now() - began;
  assert.ok(
    took - HOPS * lost <= promise,
    `${what}: it took ${took} ms, of which the machine lost ${lost}; promised are ${promise}`,
  );
}

/** Waits, in a window without WebSockets, until a stream holds the user on the page, and no PUT does. */
export const streaming = (page) =>
  page.waitForResponse((answer) => /"decrement"/.test(answer.request().postData() ?? ''), { timeout: TIMEOUT });

/**
 * Waits until the console of a window has these complaints, and forgets all so far: the browser may note a refused
 * request after its answer.
 */
export async function expectComplaints(page, ...all) {
  await eventually(true, `the console has ${all}`, () =>
    all.every((words) => page.complaints.some((said) => words.test(said))),
  );
  page.complaints.length = 0;
}

/** Waits until a window shows the count that is wanted. */
export const expectCount = (page, want, id = 'count') => eventually(want, 'the window shows', () => shown(page, id));

export const expectState = (page, want) =>
  page.waitForFunction((want) => document.getElementById('state').textContent === want, want);

/** Begins to record every count that a window shows. */
export const record = (page, id = 'count') =>
  page.evaluate((id) => {
    const element = document.getElementById(id);
    window.record = [element.count];
    element.addEventListener('count', ({ detail }) => window.record.push(detail.count));
  }, id);

/** The counts since then, each once: an event also follows when a count becomes stale, as on a busy machine. */
export const recorded = (page) => page.evaluate(() => window.record.filter((count, i, all) => count !== all[i - 1]));

/** A customer's site: one page, whatever is asked for, with the headers that are given for it. */
export async function startSite(html, headers = () => ({})) {
  const server = createServer((request, response) => {
    if (request.url === '/favicon.ico') return response.writeHead(204).end();
    response.writeHead(200, { 'Content-Type': 'text/html; charset=utf-8', ...headers() });
    response.end(html(new URL(request.url, 'http://x')));
  });
  await new Promise((ready) => server.listen(0, ready));
  // localhost, since cookies know no ports: under 127.0.0.1 it would be the server's own site.
  return { url: `http://localhost:${server.address().port}`, close: () => server.close() };
}

/** A cable to the server that can be pulled out: then nothing passes, and open connections break. */
export async function startCable(port) {
  const open = new Set();
  let pulled = false;
  const server = createTCPServer((browser) => {
    browser.on('error', () => {});
    if (pulled) return browser.destroy();
    const target = connect(port, '127.0.0.1');
    for (const socket of [browser, target]) {
      open.add(socket);
      socket.on('error', () => {});
      socket.on('close', () => {
        open.delete(socket);
        browser.destroy();
        target.destroy();
      });
    }
    browser.pipe(target).pipe(browser);
  });
  await new Promise((ready) => server.listen(0, '127.0.0.1', ready));
  const pull = () => {
    pulled = true;
    for (const socket of open) socket.destroy();
  };
  /** Open connections stay, and nothing passes, not even that the other end has closed. */
  const hush = () => {
    pulled = true;
    for (const socket of open) socket.unpipe().resume().removeAllListeners('close');
  };
  return {
    url: `http://127.0.0.1:${server.address().port}`,
    pull,
    hush,
    plug: () => (pulled = false),
    close: () => {
      pull();
      server.close();
    },
  };
}

/** A proxy for HTTP without WebSockets, as some offices have it. shop makes the pages of a site under /shop/. */
export async function startOfficeProxy(port, shop = undefined) {
  const server = createServer((request, response) => {
    if (shop && request.url.startsWith('/shop/')) {
      response.writeHead(200, { 'Content-Type': 'text/html; charset=utf-8' });
      return response.end(shop(new URL(request.url, 'http://x')));
    }
    const onward = httpRequest(
      { host: '127.0.0.1', port, method: request.method, path: request.url, headers: request.headers },
      (answer) => {
        response.writeHead(answer.statusCode, answer.headers);
        answer.pipe(response);
      },
    );
    onward.on('error', () => response.destroy());
    response.on('close', () => onward.destroy());
    request.pipe(onward);
  });
  server.on('upgrade', (_, socket) => socket.end('HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n'));
  await new Promise((ready) => server.listen(0, '127.0.0.1', ready));
  return {
    url: `http://127.0.0.1:${server.address().port}`,
    close: () => {
      server.close();
      server.closeAllConnections();
    },
  };
}

/**
 * A site and the server behind one origin, as a proxy puts them together. html makes the pages, which lie under /home/.
 */
export async function startHome(port, html) {
  const pass = (request) => ({
    host: '127.0.0.1',
    port,
    method: request.method,
    path: request.url,
    headers: request.headers,
  });
  const server = createServer((request, response) => {
    if (/^\/home\/[^/]*$/.test(request.url)) {
      response.writeHead(200, { 'Content-Type': 'text/html; charset=utf-8' });
      return response.end(html(new URL(request.url, 'http://x')));
    }
    const onward = httpRequest(pass(request), (answer) => {
      response.writeHead(answer.statusCode, answer.headers);
      answer.pipe(response);
    });
    onward.on('error', () => response.destroy());
    response.on('close', () => onward.destroy());
    request.pipe(onward);
  });
  server.on('upgrade', (request, socket) => {
    const onward = httpRequest(pass(request)).on('error', () => socket.destroy());
    onward.on('response', () => socket.destroy()); // it was refused
    onward.on('upgrade', (answer, target, head) => {
      const headers = Object.entries(answer.headers).flatMap(([name, all]) =>
        [all].flat().map((value) => `${name}: ${value}\r\n`),
      );
      socket.write(`HTTP/1.1 101 Switching Protocols\r\n${headers.join('')}\r\n`);
      socket.write(head);
      for (const one of [socket, target])
        one.on('error', () => {}).on('close', () => (socket.destroy(), target.destroy()));
      socket.pipe(target).pipe(socket);
    });
    onward.end();
  });
  await new Promise((ready) => server.listen(0, '127.0.0.1', ready));
  return {
    url: `http://127.0.0.1:${server.address().port}/home`,
    close: () => {
      server.close();
      server.closeAllConnections();
    },
  };
}
