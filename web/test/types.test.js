// The sources have the declared types.
import assert from 'node:assert/strict';
import { execFile } from 'node:child_process';
import { mkdtemp, readFile, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { test } from 'node:test';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';

import { SCRIPTS, SOURCES } from '../build.js';

const run = promisify(execFile);
const WEB = fileURLToPath(new URL('..', import.meta.url));

test('the types are right, in the sources and for users of the package', async () => {
  const tsc = join(WEB, 'node_modules/typescript/bin/tsc');
  const compile = (...args) =>
    run(process.execPath, [tsc, ...args], { cwd: WEB }).catch(({ stdout }) => assert.fail(stdout));
  await compile('-p', '.');
  const folder = await mkdtemp(join(tmpdir(), 'headcount-types-'));
  try {
    const common = {
      target: 'esnext',
      module: 'esnext',
      moduleResolution: 'bundler',
      lib: ['esnext', 'dom', 'dom.iterable', 'dom.asynciterable'],
      types: [],
      skipDefaultLibCheck: true,
    };
    const write = (name, options, files) =>
      writeFile(join(folder, name), JSON.stringify({ compilerOptions: { ...common, ...options }, files }));
    // Without headcount.d.ts beside it, so that the types in the source are read.
    await writeFile(join(folder, 'made.js'), await readFile(join(WEB, 'headcount.js')));
    for (const part of [...SCRIPTS.slice(1), ...SOURCES])
      await writeFile(
        join(folder, part),
        (await readFile(join(WEB, part), 'utf8')).replaceAll('./headcount.js', './made.js'),
      );
    await write(
      'declare.json',
      { allowJs: true, declaration: true, emitDeclarationOnly: true, strict: true, outDir: 'made' },
      ['made.js'],
    );
    await compile('-p', join(folder, 'declare.json'));
    await write('use.json', { strict: true, noEmit: true, paths: { made: [join(folder, 'made/made.d.ts')] } }, [
      join(WEB, 'test/types.ts'),
    ]);
    await compile('-p', join(folder, 'use.json'));
  } finally {
    await rm(folder, { recursive: true });
  }
});
