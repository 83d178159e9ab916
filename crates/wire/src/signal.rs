//! Names of signals (signal(7), x86-64).

/// The highest signal number; from `SIGRTMIN` on they are real-time signals.
pub const MAX: i32 = 64;
/// `SIGRTMIN` in C libraries for Linux.
const RTMIN: i32 = 34;
const NAMES: [&str; 31] = [
    "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2",
    "PIPE", "ALRM", "TERM", "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG",
    "XCPU", "XFSZ", "VTALRM", "PROF", "WINCH", "IO", "PWR", "SYS",
];

/// Parses `TERM`, `SIGTERM`, `sigterm`, `15` or `SIGRTMIN+3`; `None` if there is no such signal.
pub fn number(text: &str) -> Option<i32> {
    let in_range = |number: &i32| (1..=MAX).contains(number);
    if let Ok(number) = text.parse() {
        return Some(number).filter(in_range);
    }
    let upper = text.to_ascii_uppercase();
    let name = upper.strip_prefix("SIG").unwrap_or(&upper);
    if let Some(more) = name.strip_prefix("RTMIN") {
        let more: u8 = match more {
            "" => 0,
            more => more.strip_prefix('+')?.parse().ok()?,
        };
        return Some(RTMIN + i32::from(more)).filter(in_range);
    }
    let index = NAMES.iter().position(|known| *known == name)?;
    i32::try_from(index + 1).ok()
}

/// The name of a signal without `SIG`; `None` for a real-time signal or an invalid number.
pub fn name(number: i32) -> Option<&'static str> {
    let index = usize::try_from(number).ok()?.checked_sub(1)?;
    NAMES.get(index).copied()
}

#[cfg(test)]
mod tests {
    use super::{name, number};

    #[test]
    fn a_signal_name_parses_to_its_number() {
        for signal in 1..=31 {
            assert_eq!(name(signal).and_then(number), Some(signal));
        }
        for other in [i32::MIN, -1, 0, 32, 64, i32::MAX] {
            assert_eq!(name(other), None);
        }
    }

    #[test]
    fn signals_are_parsed_from_names_and_numbers() {
        for (text, expected) in [
            ("TERM", 15),
            ("SIGKILL", 9),
            ("sigsys", 31),
            ("2", 2),
            ("64", 64),
            ("RTMIN", 34),
            ("SIGRTMIN+3", 37),
            ("SIGRTMIN+30", 64),
        ] {
            assert_eq!(number(text), Some(expected), "{text}");
        }
        for text in ["", "0", "65", "-1", "NOPE", "SIG", "SIGRTMIN+31", "RTMIN-1"] {
            assert_eq!(number(text), None, "{text}");
        }
    }
}
