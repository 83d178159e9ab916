//! What `jiffy-init` reads in a guest: the host's files, and those of an image.

use crate::Target;
use crate::input::Input;
use jiffy_guest::{boot, gate, program};

/// This target.
pub const TARGET: Target = Target {
    name: "guest_files",
    covers: &[
        "crates/guest/src/boot/configuration.rs",
        "crates/guest/src/boot/preload.rs",
        "crates/guest/src/gate/generation.rs",
        "crates/guest/src/program/user.rs",
    ],
    seeds: all_seeds,
    run,
};

const CONFIGURATION: u8 = 0;
const GENERATION: u8 = 1;
const USER: u8 = 2;
const PROGRAM: u8 = 3;

fn run(data: &[u8]) {
    let mut input = Input(data);
    match input.u8() % 4 {
        CONFIGURATION => {
            let _ = boot::configuration::parse(input.rest());
        }
        GENERATION => {
            let _ = gate::generation::parse(input.rest());
        }
        PROGRAM => {
            let path = boot::preload::interpreter(input.rest());
            assert!(path.is_none_or(|path| path.starts_with('/')));
        }
        _ => {
            let text = String::from_utf8_lossy(input.rest());
            let mut parts = text.splitn(3, '\0');
            let mut part = || parts.next().unwrap_or_default();
            let (wanted, passwd, group) = (part(), part(), part());
            if let Ok(user) = program::user::find(wanted, passwd, group) {
                assert!(user.ids.uid != u32::MAX && user.ids.gid != u32::MAX);
                assert!(!user.ids.groups.contains(&u32::MAX) && !user.home.is_empty());
            }
        }
    }
}

fn all_seeds() -> Vec<Vec<u8>> {
    let of = |kind: u8, text: &str| [&[kind], text.as_bytes()].concat();
    let golden = include_str!("../../../crates/wire/golden/guest-1.txt").lines();
    let mut seeds: Vec<_> = golden
        .filter_map(|line| line.split_once(' '))
        .filter_map(|(name, text)| match name {
            "GuestConfig" => Some(of(CONFIGURATION, text)),
            "Generation" => Some(of(GENERATION, text)),
            _ => None,
        })
        .collect();
    let files = "root:x:0:0:root:/root:/bin/sh\nme:x:1000:1001::/home/me:/bin/sh\nbad\0users:x:100:me,you\nme:x:1001:\n";
    for wanted in ["me", "1000", "me:users", "7:8", "root", "4294967295"] {
        seeds.push(of(USER, &format!("{wanted}\0{files}")));
    }
    let mut elf = vec![0; 64 + 56];
    elf[..6].copy_from_slice(b"\x7fELF\x02\x01");
    (elf[32], elf[54], elf[56]) = (64, 56, 1);
    (elf[64], elf[64 + 8], elf[64 + 32]) = (3, 120, 11);
    elf.extend(b"/lib/ld.so\0");
    seeds.push([&[PROGRAM], &elf[..]].concat());
    seeds.push(of(PROGRAM, "#! /bin/sh -e\necho"));
    seeds
}
