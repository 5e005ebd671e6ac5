// @ts-check
import { mount } from "./explorer.js";
