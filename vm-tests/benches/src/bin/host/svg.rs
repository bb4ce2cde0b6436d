//! The elements of every picture. The text needs no font of its own.

/// A picture with a title and a line below it.
pub(crate) fn begin(width: f64, height: f64, title: &str, subtitle: &str) -> String {
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"sans-serif\" fill=\"#212529\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"#fff\"/>\n"
    );
    text(&mut svg, 30.0, 36.0, 21, "start", title);
    text(&mut svg, 30.0, 60.0, 13, "start", subtitle);
    svg
}

/// Ends the picture and returns it whole.
pub(crate) fn end(mut svg: String) -> String {
    svg.push_str("</svg>\n");
    svg
}

/// Writes `content` at a place, aligned by `anchor`: `start`, `middle` or `end`.
pub(crate) fn text(svg: &mut String, x: f64, y: f64, size: u32, anchor: &str, content: &str) {
    let content = escaped(content);
    line(
        svg,
        &format!(
            "<text x=\"{x:.1}\" y=\"{y:.1}\" font-size=\"{size}\" text-anchor=\"{anchor}\">{content}</text>"
        ),
    );
}

/// Writes `content` in a colour, beginning at a place, readable over lines.
pub(crate) fn coloured(svg: &mut String, x: f64, y: f64, size: u32, colour: &str, content: &str) {
    let content = escaped(content);
    line(
        svg,
        &format!(
            "<text x=\"{x:.1}\" y=\"{y:.1}\" font-size=\"{size}\" fill=\"{colour}\" \
             stroke=\"#fff\" stroke-width=\"4\" paint-order=\"stroke\">{content}</text>"
        ),
    );
}

/// Writes one element on a line of its own.
pub(crate) fn line(svg: &mut String, element: &str) {
    svg.push_str(element);
    svg.push('\n');
}

fn escaped(content: &str) -> String {
    content.replace('&', "&amp;").replace('<', "&lt;")
}
