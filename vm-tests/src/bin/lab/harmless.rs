//! The kernel messages that look like a defect and are known to be harmless.

use crate::kernel::Series;

/// One line each: `SERIES "TEXT" reason`; `*` stands for every series.
const LIST: &str = include_str!("../../../harmless-kernel-messages");

/// The `alarms` that report a defect.
pub(crate) fn defects(series: Series, alarms: &[String]) -> Vec<&str> {
    let alarms = alarms.iter().map(String::as_str);
    alarms
        .filter(|alarm| !is_harmless(LIST, series, alarm))
        .collect()
}

fn is_harmless(list: &str, series: Series, alarm: &str) -> bool {
    entries(list).any(|(known, text)| series.is_named(known) && alarm.contains(text))
}

/// The series and the text of each line.
fn entries(list: &str) -> impl Iterator<Item = (&str, &str)> {
    let lines = list.lines().filter(|line| !line.starts_with('#'));
    lines.filter_map(|line| {
        let (series, rest) = line.split_once(" \"")?;
        let (text, reason) = rest.split_once("\" ")?;
        (!text.is_empty() && !reason.is_empty()).then_some((series, text))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_harmless_only_on_the_series_that_lists_it() {
        let list =
            "# why\n5.10 \"WARNING: at old.c\" mended in 5.12\n* \"soft lockup\" the host's\n";
        let harmless = |series, alarm| is_harmless(list, series, alarm);
        let (old, new) = (Series::V5_10, Series::V6_1);
        assert!(harmless(old, "[ 1.0] WARNING: at old.c:7"));
        assert!(!harmless(new, "[ 1.0] WARNING: at old.c:7"));
        assert!(harmless(new, "[ 1.0] BUG: soft lockup"));
        assert!(!harmless(new, "[ 1.0] BUG: scheduling while atomic"));
    }

    #[test]
    fn each_line_has_a_known_series_a_text_and_a_reason() {
        let lines = LIST.lines().filter(|line| !line.starts_with('#'));
        assert_eq!(entries(LIST).count(), lines.count());
        for (series, text) in entries(LIST) {
            let known = ["*", "5.10", "6.1", "6.12", "newest", "sid"].contains(&series);
            assert!(known, "{series} {text}");
        }
    }
}
