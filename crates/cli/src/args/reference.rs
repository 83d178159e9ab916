//! `docs/cli.md` says what `--help` says.

use super::Cli;
use clap::{Command, CommandFactory};

const MARK: &str = "<!-- generated: UPDATE_DOCS=1 cargo test -p jiffy-cli reference -->\n";

#[test]
fn docs_cli_md_matches_the_help_texts() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/cli.md");
    let page = std::fs::read_to_string(path).unwrap();
    let (written, _) = page.split_once(MARK).expect("the page has its mark");
    let mut wanted = format!("{written}{MARK}");
    let mut jiffy = Cli::command().term_width(80);
    jiffy.build();
    describe(&mut jiffy, "jiffy", &mut wanted);
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(path, &wanted).unwrap();
    } else {
        assert!(
            page == wanted,
            "docs/cli.md is out of date: UPDATE_DOCS=1 cargo test -p jiffy-cli reference"
        );
    }
}

fn describe(command: &mut Command, name: &str, out: &mut String) {
    let help = command.render_long_help().to_string();
    let help: Vec<&str> = help.trim_end().lines().map(str::trim_end).collect();
    out.push_str(&format!(
        "\n### `{name}`\n\n```text\n{}\n```\n",
        help.join("\n")
    ));
    for inner in command.get_subcommands_mut() {
        if inner.get_name() != "help" {
            let name = format!("{name} {}", inner.get_name());
            describe(inner, &name, out);
        }
    }
}
