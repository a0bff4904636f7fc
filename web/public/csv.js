// Tables as files.

/** Has the browser save rows of values under a name. */
export function save(name, rows) {
  const file = new Blob([rows.map((row) => row.map(cell).join(',') + '\r\n').join('')], { type: 'text/csv' });
  const link = document.createElement('a');
  link.href = URL.createObjectURL(file);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** A value as RFC 4180 has it. A text that a spreadsheet would take for a formula begins with an apostrophe. */
function cell(value) {
  let text = String(value);
  if (typeof value === 'string' && /^[=+\-@\t\r]/.test(text)) text = `'${text}`;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
