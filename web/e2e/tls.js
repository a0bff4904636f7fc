// A proxy that ends TLS before the server, with a certificate that no browser knows.
import { execFile } from 'node:child_process';
import { mkdtemp, readFile, rm } from 'node:fs/promises';
import { request as httpRequest } from 'node:http';
import { createServer } from 'node:https';
import { connect } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { promisify } from 'node:util';

/** Makes a certificate for the loopback. */
async function certificate() {
  const folder = await mkdtemp(join(tmpdir(), 'headcount-tls-'));
  const [key, cert] = [join(folder, 'key.pem'), join(folder, 'cert.pem')];
  try {
    await promisify(execFile)('openssl', [
      'req',
      '-x509',
      '-newkey',
      'ec',
      '-pkeyopt',
      'ec_paramgen_curve:prime256v1',
      '-nodes',
      '-days',
      '2',
      '-subj',
      '/CN=127.0.0.1',
      '-keyout',
      key,
      '-out',
      cert,
    ]);
    return { key: await readFile(key), cert: await readFile(cert) };
  } finally {
    await rm(folder, { recursive: true });
  }
}

/** The server at a port has to trust the proxy: --trusted-proxies 127.0.0.1/32. */
export async function startTLS(port) {
  const open = new Set();
  const server = createServer(await certificate(), (request, response) => {
    const headers = {
      ...request.headers,
      'x-forwarded-proto': 'https',
      'x-forwarded-for': request.socket.remoteAddress,
    };
    const onward = httpRequest(
      { host: '127.0.0.1', port, method: request.method, path: request.url, headers },
      (answer) => {
        response.writeHead(answer.statusCode, answer.headers);
        answer.pipe(response);
      },
    );
    onward.on('error', () => response.destroy());
    response.on('close', () => onward.destroy());
    request.pipe(onward);
  });
  server.on('upgrade', (request, browser, head) => {
    const target = connect(port, '127.0.0.1');
    const lines = Object.entries({
      ...request.headers,
      'x-forwarded-proto': 'https',
      'x-forwarded-for': '127.0.0.1',
    }).map(([name, value]) => `${name}: ${value}\r\n`);
    target.write(`GET ${request.url} HTTP/1.1\r\n${lines.join('')}\r\n`);
    target.write(head);
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
  return {
    url: `https://127.0.0.1:${server.address().port}`,
    close: () => {
      for (const socket of open) socket.destroy();
      server.close();
      server.closeAllConnections();
    },
  };
}
