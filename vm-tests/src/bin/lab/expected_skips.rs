//! The known skips, by kernel series.

use std::collections::BTreeSet;

use vm_tests::job::TestCase;

use crate::kernel::Series;

/// One line each: `SERIES FILE::NAME reason`; `*` stands for every series.
const LIST: &str = include_str!("../../../expected-skips");

/// Why `test` cannot run on `series`, if the list says so.
pub(crate) fn reason(series: Series, test: &str) -> Option<&'static str> {
    listed(LIST, series, test)
}

/// The lines that name no test.
pub(crate) fn stale(tests: &[TestCase]) -> Vec<&'static str> {
    let ids: BTreeSet<String> = tests.iter().map(TestCase::id).collect();
    let lines = entries(LIST).filter(|(_, name, _)| !ids.contains(*name));
    lines.map(|(_, name, _)| name).collect()
}

fn listed<'list>(list: &'list str, series: Series, test: &str) -> Option<&'list str> {
    entries(list)
        .find(|(known, name, _)| series.is_named(known) && *name == test)
        .map(|(_, _, reason)| reason)
}

/// The series, the name and the reason of each line.
fn entries(list: &str) -> impl Iterator<Item = (&str, &str, &str)> {
    let lines = list.lines().filter(|line| !line.starts_with('#'));
    lines.filter_map(|line| {
        let (series, rest) = line.split_once(' ')?;
        let (name, reason) = rest.split_once(' ')?;
        Some((series, name, reason))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_skip_is_expected_only_on_the_series_that_lists_it() {
        let list = "# why\n5.10 nbd::destroy no such flag before 5.12\n* fc::npiv no hardware\n";
        let reason = |series, test| listed(list, series, test);
        assert_eq!(
            reason(Series::V5_10, "nbd::destroy"),
            Some("no such flag before 5.12")
        );
        assert_eq!(reason(Series::V6_1, "nbd::destroy"), None);
        assert_eq!(reason(Series::V6_1, "fc::npiv"), Some("no hardware"));
        assert_eq!(reason(Series::V6_1, "fc"), None);
    }

    #[test]
    fn each_line_names_a_known_series_and_a_reason() {
        let lines = LIST.lines().filter(|line| !line.starts_with('#'));
        assert_eq!(entries(LIST).count(), lines.count());
        for (series, name, reason) in entries(LIST) {
            let known = ["*", "5.10", "6.1", "6.12", "newest", "sid"].contains(&series);
            assert!(known && !reason.is_empty(), "{series} {name}");
        }
    }

    #[test]
    fn a_line_that_names_no_test_is_stale() {
        let (_, name, _) = entries(LIST).next().unwrap();
        assert!(stale(&[]).contains(&name));
        let (file, test) = name.split_once("::").unwrap();
        let known = TestCase {
            file: file.to_owned(),
            name: test.to_owned(),
        };
        assert!(!stale(&[known]).contains(&name));
    }
}
