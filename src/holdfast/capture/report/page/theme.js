// The button that chooses a light or a dark page. Shared by the report and by the page of `holdfast serve`.
const THEMES = { auto: "System theme", light: "Light theme", dark: "Dark theme" };

export function startTheme(button) {
  let theme = "auto";
  const show = () => {
    button.textContent = THEMES[theme];
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    document.dispatchEvent(new CustomEvent("themed"));
  };
  button.addEventListener("click", () => {
    const names = Object.keys(THEMES);
    theme = names[(names.indexOf(theme) + 1) % names.length];
    show();
  });
  show();
}
