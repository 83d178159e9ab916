//! The kernel command line of every Linux guest.
//!
//! The options are in one place, `kernel/command-line`, which this module and
//! `kernel/measure` read; `docs/kernel-command-line.md` justifies each.

/// `kernel/command-line`: one option per line, `#` starts a comment line.
const FILE: &str = include_str!("../../../kernel/command-line");

/// Default options that are left out with a serial console.
const NOT_WITH_CONSOLE: [&str; 2] = ["quiet", "8250.nr_uarts=0"];
/// Options that are added with a serial console.
const WITH_CONSOLE: [&str; 2] = ["console=ttyS0", "8250.nr_uarts=1"];

/// The default options, in order.
pub fn default_options() -> impl Iterator<Item = &'static str> {
    FILE.lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
}

/// The default command line, without a console.
pub fn default_command_line() -> String {
    join(default_options())
}

/// The command line of a guest with its console on COM1.
pub fn console_command_line() -> String {
    join(
        default_options()
            .filter(|option| !NOT_WITH_CONSOLE.contains(option))
            .chain(WITH_CONSOLE),
    )
}

fn join(options: impl Iterator<Item = &'static str>) -> String {
    options.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_options_contain_no_blanks_or_comments() {
        assert!(default_options().count() > 3);
        for option in default_options() {
            assert!(!option.contains([' ', '\t', '#']), "{option}");
        }
    }

    #[test]
    fn a_console_replaces_the_quiet_options() {
        let silent: Vec<_> = default_options().collect();
        for option in NOT_WITH_CONSOLE {
            assert!(
                silent.contains(&option),
                "{option} is not in kernel/command-line any more"
            );
        }
        let line = console_command_line();
        let options: Vec<_> = line.split(' ').collect();
        assert!(options.contains(&"console=ttyS0"));
        assert!(!options.contains(&"quiet"));
        assert!(!options.contains(&"8250.nr_uarts=0"));
        assert_eq!(options.len(), silent.len());
    }

    #[test]
    fn the_document_justifies_every_option() {
        let document = include_str!("../../../docs/kernel-command-line.md");
        for option in default_options() {
            assert!(
                document.contains(&format!("`{option}`")),
                "{option} is not explained"
            );
        }
    }
}
