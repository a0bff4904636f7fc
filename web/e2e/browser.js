// What the tests in a real Chromium share: the browser, its windows, a customer's
// site, and proxies between browser and server.
import assert from 'node:assert/strict';
import { existsSync } from 'node:fs';
import { createServer, request as httpRequest } from 'node:http';
import { connect, createServer as createTCPServer } from 'node:net';
import { setTimeout as sleep } from 'node:timers/promises';

import { chromium } from 'playwright-core';

const CHROMIUM = process.env.CHROMIUM || '/usr/bin/chromium';

export const LEAVE_GRACE = 2_000; // the server's default

/** The upper limit, in ms, for everything that ought to be quick: machines are busy. */
export const PATIENCE = 15_000;

export function launch() {
  assert.ok(
    existsSync(CHROMIUM),
    `There is no browser at ${CHROMIUM}: install it (Debian: apt-get install chromium) or name one in CHROMIUM.`,
  );
  return chromium.launch({
    executablePath: CHROMIUM,
    ignoreDefaultArgs: ['--disable-back-forward-cache'], // people have it
    args: [
      '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run',
      '--disable-background-networking', '--disable-component-update', '--disable-sync',
    ],
  });
}

/** A window whose console errors are kept. */
export async function open(context, address, prepare = async () => {}) {
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
export async function eventually(want, what, within = PATIENCE, get = undefined) {
  const deadline = Date.now() + within;
  let got;
  do {
    got = await get();
    if (got === want) return;
    await sleep(25);
  } while (Date.now() < deadline);
  assert.fail(`${what}: ${got}, not ${want}, after ${within} ms`);
}

/** Waits until a window shows the count that is wanted. */
export const expectCount = (page, want, within = PATIENCE, id = 'count') =>
  eventually(want, 'the window shows', within, () => shown(page, id));

export const expectState = (page, want, within = PATIENCE) =>
  page.waitForFunction((want) => document.getElementById('state').textContent === want, want, { timeout: within });

/** Begins to record every count that a window shows. */
export const record = (page, id = 'count') =>
  page.evaluate((id) => {
    const element = document.getElementById(id);
    window.record = [element.count];
    element.addEventListener('count', ({ detail }) => window.record.push(detail.count));
  }, id);

export const recorded = (page) => page.evaluate(() => window.record);

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
  return {
    url: `http://127.0.0.1:${server.address().port}`,
    pull,
    plug: () => (pulled = false),
    close: () => {
      pull();
      server.close();
    },
  };
}

/** A proxy for HTTP without WebSockets, as some offices have it. */
export async function startOfficeProxy(port) {
  const server = createServer((request, response) => {
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
