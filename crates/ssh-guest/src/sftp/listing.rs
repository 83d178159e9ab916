//! Lines of `ls -l`.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

/// The start of a line of `ls -l`, before the name. Owners are numbers, and the time is UTC.
pub fn listing(facts: &Metadata) -> String {
    let mode = facts.mode();
    let kind = match mode & 0o170_000 {
        0o040_000 => 'd',
        0o120_000 => 'l',
        0o060_000 => 'b',
        0o020_000 => 'c',
        0o010_000 => 'p',
        0o140_000 => 's',
        _ => '-',
    };
    let bits: String = "rwxrwxrwx"
        .chars()
        .enumerate()
        .map(|(place, letter)| match mode & (0o400 >> place) {
            0 => '-',
            _ => letter,
        })
        .collect();
    let (year, month, day) = date(facts.mtime().div_euclid(86_400));
    let minutes = facts.mtime().rem_euclid(86_400) / 60;
    format!(
        "{kind}{bits} {:>4} {:<8} {:<8} {:>8} {year}-{month:02}-{day:02} {:02}:{:02} ",
        facts.nlink(),
        facts.uid(),
        facts.gid(),
        facts.size(),
        minutes / 60,
        minutes % 60,
    )
}

/// Year, month and day of this many days after 1970-01-01.
// Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms", civil_from_days.
fn date(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468; // since 0000-03-01
    let (era, day) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153; // since March
    let day = day - (153 * month + 2) / 5 + 1;
    let (year, month) = match month {
        0..10 => (year, month + 3),
        _ => (year + 1, month - 9),
    };
    (era * 400 + year, month, day)
}

#[cfg(test)]
mod tests {
    use super::date;

    #[test]
    fn days_since_the_epoch_become_dates() {
        assert_eq!(date(0), (1970, 1, 1));
        assert_eq!(date(-1), (1969, 12, 31));
        assert_eq!(date(11_016), (2000, 2, 29));
        assert_eq!(date(11_017), (2000, 3, 1));
        assert_eq!(date(47_540), (2100, 2, 28));
        assert_eq!(date(47_541), (2100, 3, 1));
    }
}
