//! Whether a file of wanted volumes is whole, as its first and its last line say.

/// Requires of a file that says `has_end = true` that it says so first, and that its last line
/// is `[end]`. A copy that ends early lacks this last line, or it has no volume. The text has been
/// parsed, so a last line like this is a table.
pub(super) fn require_end(text: &str) -> Result<(), &'static str> {
    let is_content = |line: &&str| !line.is_empty() && !line.starts_with('#');
    // An editor may have put a byte order mark first. The parser also passes over it.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let first = text.lines().map(str::trim).find(is_content);
    if !first.is_some_and(|line| line.starts_with("has_end")) {
        return Err("`has_end = true` is not its first line");
    }
    if !text.ends_with('\n') || text.lines().next_back() != Some("[end]") {
        return Err("its last line is not `[end]` with a newline");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use lunbd::reconcile::Desired;
    use lunbd::{ErrorKind, Result};

    const WHOLE: &str = r#"# Of a generator.
has_end = true

[[volume]]
id = "pvc-1"
source = "nbd://192.0.2.1/vol-1"

[[volume]]
id = "pvc-2"
source = "nbd://192.0.2.1/vol-7"
[volume.nbd]
read_only = true
connections = 2

[end]
"#;

    fn read(text: &str) -> Result<Desired> {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), text).unwrap();
        super::super::read(file.path(), false)
    }

    #[test]
    fn a_file_that_announces_its_end_is_refused_wherever_it_is_cut() {
        let inline = "has_end = true\nvolume = [{ id = \"a\", source = \"nbd://h/x\" }]\n[end]\n";
        let none = "has_end = true\nvolume = []\n[end]\n";
        let lines_of_windows = WHOLE.replace('\n', "\r\n");
        let after_byte_order_mark = format!("\u{feff}{lines_of_windows}");
        for (text, volumes) in [
            (WHOLE, 2),
            (&lines_of_windows, 2),
            (&after_byte_order_mark, 2),
            (inline, 1),
            (none, 0),
        ] {
            assert_eq!(read(text).unwrap().len(), volumes);
            for (length, _) in text.char_indices() {
                let cut = &text[..length];
                assert!(read(cut).is_err(), "accepted, cut after: {cut}");
            }
        }
    }

    #[test]
    fn an_end_that_a_cut_could_miss_is_refused() {
        let volume = "[[volume]]\nid = \"a\"\nsource = \"nbd://h/x\"\n";
        for (text, why) in [
            (format!("has_end = true\n[end]\n{volume}"), "last line"),
            (
                format!("has_end = true\n{volume}[end]\n[volume.nbd]\nread_only = true\n"),
                "last line",
            ),
            (
                format!("has_end = true\n{volume}[end]\n# more\n"),
                "last line",
            ),
            (format!("has_end = true\nend = {{}}\n{volume}"), "last line"),
            (
                "volume = []\nhas_end = true\n[end]\n".to_owned(),
                "first line",
            ),
            (
                format!("has_end = true\n{volume}[end]\nid = \"b\"\n"),
                "unknown field",
            ),
            (format!("{volume}[end]\n"), "no `has_end = true`"),
        ] {
            let error = read(&text).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
            assert!(error.to_string().contains(why), "{error}: {text}");
        }
    }
}
