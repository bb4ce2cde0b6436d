//! The skips that are known, by kernel series.

use crate::kernel::Series;

/// `SERIES FILE::NAME reason`, a line each; `*` stands for every series.
const LIST: &str = include_str!("../../../expected-skips");

/// Whether `test` may skip on `series`.
pub(crate) fn is_expected(series: Series, test: &str) -> bool {
    listed(LIST, &series.to_string(), test)
}

fn listed(list: &str, series: &str, test: &str) -> bool {
    list.lines()
        .filter(|line| !line.starts_with('#'))
        .any(|line| {
            let mut words = line.split_whitespace();
            matches!((words.next(), words.next()), (Some(known), Some(name))
            if (known == "*" || known == series) && name == test)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_skip_is_expected_only_on_the_series_that_lists_it() {
        let list = "# why\n5.10 nbd::destroy no such flag before 5.12\n* fc::npiv no hardware\n";
        assert!(listed(list, "5.10", "nbd::destroy"));
        assert!(!listed(list, "6.1", "nbd::destroy"));
        assert!(listed(list, "6.1", "fc::npiv"));
        assert!(!listed(list, "6.1", "fc"));
    }
}
