//! Plots figures as bars, in SVG.

use crate::figure::{Figure, format_value};
use std::fmt::Write;

const WIDTH: f64 = 860.0;
const LABEL: f64 = 300.0;
const ROW: f64 = 26.0;
const OURS: &str = "#0b7285";
const THEIRS: &str = "#adb5bd";

/// Bars grouped by case and scaled within each group. `title` has the date and the machine.
pub fn svg(title: &str, figures: &[&Figure]) -> String {
    let mut cases: Vec<&str> = Vec::new();
    for figure in figures {
        if !cases.contains(&figure.case.as_str()) {
            cases.push(&figure.case);
        }
    }
    let height = 56.0 + ROW * (figures.len() + 2 * cases.len()) as f64;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n\
         <text x=\"12\" y=\"26\" font-size=\"16\">{}</text>\n",
        escape(title)
    );
    let mut y = 48.0;
    for case in cases {
        y += ROW;
        let group: Vec<_> = figures
            .iter()
            .filter(|figure| figure.case == case)
            .collect();
        let largest = group.iter().map(|figure| figure.median).fold(0.0, f64::max);
        let _ = writeln!(
            out,
            "<text x=\"12\" y=\"{:.0}\" font-weight=\"bold\">{}</text>",
            y,
            escape(case)
        );
        for figure in group {
            y += ROW;
            bar(&mut out, y, figure, largest);
        }
        y += ROW / 2.0;
    }
    out.push_str("</svg>\n");
    out
}

fn bar(out: &mut String, y: f64, figure: &Figure, largest: f64) {
    let room = WIDTH - LABEL - 120.0;
    let length = if largest > 0.0 {
        room * figure.median / largest
    } else {
        0.0
    };
    let colour = if figure.monitor == "jiffy" {
        OURS
    } else {
        THEIRS
    };
    let _ = writeln!(
        out,
        "<text x=\"{:.0}\" y=\"{y:.0}\" text-anchor=\"end\">{}</text>\
         <rect x=\"{LABEL}\" y=\"{:.0}\" width=\"{length:.1}\" height=\"16\" fill=\"{colour}\"/>\
         <text x=\"{:.1}\" y=\"{y:.0}\">{}</text>",
        LABEL - 10.0,
        escape(&figure.monitor),
        y - 13.0,
        LABEL + length + 8.0,
        escape(&format_value(figure.median, &figure.unit))
    );
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figure::Clock;

    #[test]
    fn the_longest_bar_of_each_case_fills_the_width() {
        let figure = |case: &str, monitor: &str, median: f64| {
            Figure::of(case, monitor, Clock::Count, "exits", vec![median]).unwrap()
        };
        let figures = [
            figure("boot", "jiffy", 10.0),
            figure("boot", "a<b", 40.0),
            figure("memory", "jiffy", 3.0),
        ];
        let picture = svg("t", &figures.iter().collect::<Vec<_>>());
        assert_eq!(picture.matches("width=\"440.0\"").count(), 2);
        assert!(picture.contains("width=\"110.0\""));
        assert!(picture.contains("a&lt;b") && !picture.contains("a<b"));
    }
}
