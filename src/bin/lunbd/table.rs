//! Tables of text.

use std::io::{self, Write};

/// Writes each row on a line, with all cells of a column equally wide.
pub(crate) fn write<const N: usize>(out: &mut dyn Write, rows: &[[String; N]]) -> io::Result<()> {
    let widths = rows.iter().fold([0; N], |mut widths, row| {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
        widths
    });
    for row in rows {
        let cells: Vec<String> = row
            .iter()
            .zip(widths)
            .map(|(cell, width)| format!("{cell:width$}"))
            .collect();
        writeln!(out, "{}", cells.join("  ").trim_end())?;
    }
    Ok(())
}
